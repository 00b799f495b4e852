local helper = require("spec.helper")
local sampler = require("liger.data.sampler")

local function numbers(n)
  local list = {}
  for i = 1, n do
    list[i] = i
  end
  return list
end

local function sorted(list)
  local y = { unpack(list) }
  table.sort(y)
  return y
end

describe("a shuffle", function()
  it("keeps every row once, and the list as it was", function()
    local list = numbers(100)
    local shuffled = sampler.shuffle(list, 1)
    assert.same(numbers(100), list)
    assert.same(numbers(100), sorted(shuffled))
    assert.are_not.same(numbers(100), shuffled)
  end)

  it("is decided by seed and stream alone", function()
    local list = numbers(50)
    assert.same(sampler.shuffle(list, 7), sampler.shuffle(list, 7))
    assert.same(sampler.shuffle(list, 7), sampler.shuffle(list, 7, 0))
    assert.are_not.same(sampler.shuffle(list, 7), sampler.shuffle(list, 8))
    assert.are_not.same(sampler.shuffle(list, 7), sampler.shuffle(list, 7, 1))
  end)

  it("of few rows", function()
    assert.same({}, sampler.shuffle({}, 1))
    assert.same({ "a" }, sampler.shuffle({ "a" }, 1))
  end)

  it("puts every row everywhere equally often", function()
    local counts = {}
    for seed = 1, 3000 do
      local y = sampler.shuffle({ 1, 2, 3 }, seed)
      local order = table.concat(y)
      counts[order] = (counts[order] or 0) + 1
    end
    -- 6 orders, 500 each, deviation 20.
    for _, order in ipairs({ "123", "132", "213", "231", "312", "321" }) do
      assert.is_true(math.abs(counts[order] - 500) < 100, order)
    end
  end)
end)

describe("a sampler", function()
  it("B94: gives every row once an epoch, in an order that seed and epoch decide", function()
    local s, epochs = sampler.new(numbers(8), 3), {}
    for epoch = 1, 3 do
      epochs[epoch] = {}
      for _ = 1, 4 do
        for _, row in ipairs(s:next(2)) do
          table.insert(epochs[epoch], row)
        end
      end
      assert.same(numbers(8), sorted(epochs[epoch]))
      assert.equal(epoch, s:epochs())
    end
    assert.are_not.same(epochs[1], epochs[2])
    -- A second one that takes the same number of rows in other portions is at the same place.
    local again = sampler.new(numbers(8), 3)
    again:next(12)
    assert.same({ epochs[2][5], epochs[2][6] }, again:next(2))
    assert.are_not.same(epochs[1], sampler.new(numbers(8), 4):next(8))
  end)

  it("crosses an epoch's end without a gap, also by more than one epoch", function()
    local s = sampler.new(numbers(3), 1)
    local all = s:next(2)
    for _, row in ipairs(s:next(10)) do
      all[#all + 1] = row
    end
    assert.equal(12, #all)
    for epoch = 0, 3 do
      assert.same({ 1, 2, 3 }, sorted({ unpack(all, epoch * 3 + 1, epoch * 3 + 3) }))
    end
    assert.equal(4, s:epochs())
    s:next(1)
    helper.close(s:epochs(), 4 + 1 / 3, 1e-12)
  end)

  it("keeps the file's order when asked", function()
    local s = sampler.new({ "a", "b", "c" }, 1, false)
    assert.same({ "a", "b", "c", "a" }, s:next(4))
  end)

  it("needs a row", function()
    helper.raises(function()
      sampler.new({}, 1)
    end, "data: there are no rows")
  end)
end)
