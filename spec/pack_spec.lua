local helper = require("spec.helper")
local pack = require("liger.nn.pack")

local function list(t)
  return t:to_table()
end

describe("packed sequences", function()
  it("lie end to end with their positions, starts and next ids", function()
    local p = pack.sequences({ { 4, 5, 6 }, { 7 }, {}, { 8, 9 } })
    assert.same({ 4, 5, 6, 7, 8, 9 }, list(p.ids))
    assert.same({ 0, 1, 2, 0, 0, 1 }, list(p.position))
    assert.same({ 0, 3, 4, 4, 6 }, list(p.cu_seqlens))
    assert.same({ 5, 6, -100, -100, 9, -100 }, list(p.target))
    assert.equal(3, p.max_length)
    assert.equal(6, p.num_tokens)
  end)

  it("may be none", function()
    local p = pack.sequences({})
    assert.same({ 0 }, list(p.cu_seqlens))
    assert.equal(0, p.num_tokens)
  end)
end)

describe("packed completions", function()
  it("are the only targets, and their last id is no input", function()
    local p = pack.completions({
      { ids = { 1, 2, 3 }, completion = { 4, 5 } },
      { ids = { 6 }, completion = { 7 } },
      { ids = { 8, 9 }, completion = {} },
    })
    assert.same({ 1, 2, 3, 4, 6, 8, 9 }, list(p.ids))
    assert.same({ 0, 1, 2, 3, 0, 0, 1 }, list(p.position))
    assert.same({ -100, -100, 4, 5, 7, -100, -100 }, list(p.target))
    assert.same({ 0, 4, 5, 7 }, list(p.cu_seqlens))
    assert.same({ 2, 3, 4 }, list(p.rows))
    assert.same({ 0, 0, 1 }, list(p.sequence))
    assert.same({ 0, 2, 3, 3 }, list(p.completion_cu))
    assert.equal(3, p.num_completion)
    assert.equal(4, p.max_length)
    assert.equal(7, p.num_tokens)
  end)

  it("B47: learn the id that ends them, once, where it is what pads elsewhere", function()
    local p = pack.completions({
      { ids = { 5, 6 }, completion = { 2 } }, { ids = { 5 }, completion = { 6, 2 } },
    })
    assert.same({ 5, 6, 5, 6 }, list(p.ids))
    assert.same({ -100, 2, 6, 2 }, list(p.target))
    -- Of 5 6 2 2 2 with two pads: the pads are not there.
    assert.same({ 6, 2, -100 }, list(pack.sequences({ { 5, 6, 2 } }).target))
  end)

  it("may be none", function()
    local p = pack.completions({})
    assert.equal(0, p.num_completion)
    assert.equal(0, p.num_tokens)
  end)

  it("need a prompt", function()
    helper.raises(function()
      pack.completions({ { ids = { 1 }, completion = { 2 } }, { ids = {}, completion = { 1, 2 } } })
    end, "pack: sample 2 has no prompt, wanted at least one token")
  end)
end)

describe("splitting samples", function()
  local function sample(prompt, completion)
    local s = { ids = {}, completion = {} }
    for i = 1, prompt do
      s.ids[i] = i
    end
    for i = 1, completion do
      s.completion[i] = i
    end
    return s
  end

  local function sizes(parts)
    local y = {}
    for i, part in ipairs(parts) do
      y[i] = #part
    end
    return y
  end

  it("keeps their order and the limit", function()
    local samples = { sample(2, 2), sample(1, 3), sample(4, 4), sample(1, 1), sample(1, 0) }
    local parts = pack.split(samples, 8)
    assert.same({ 2, 1, 2 }, sizes(parts))
    assert.equal(samples[1], parts[1][1])
    assert.equal(samples[5], parts[3][2])
  end)

  it("puts a sample above the limit into a part of its own", function()
    assert.same({ 1, 1, 1 }, sizes(pack.split({ sample(1, 1), sample(20, 20), sample(1, 1) }, 8)))
    assert.same({ 1 }, sizes(pack.split({ sample(20, 20) }, 1)))
  end)

  it("has no limit at 0, and no parts of nothing", function()
    assert.same({ 3 }, sizes(pack.split({ sample(9, 9), sample(9, 9), sample(9, 9) }, 0)))
    assert.same({}, pack.split({}, 8))
  end)
end)
