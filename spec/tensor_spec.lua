local helper = require("spec.helper")
local ffi = require("ffi")
local fn = require("liger.fn")
local Tensor = require("liger.tensor")

local raises = helper.raises

describe("tensor from a table", function()
  it("takes nested lists, numbers and every dtype", function()
    for _, dtype in ipairs({ "f32", "bf16", "f16", "f64", "i32", "i64", "u8" }) do
      local x = Tensor.from_table({ { 1, 2, 3 }, { 4, 5, 6 } }, dtype)
      assert.same({ 2, 3 }, x.shape)
      assert.equal(dtype, x.dtype)
      assert.same({ { 1, 2, 3 }, { 4, 5, 6 } }, x:to_table())
    end
    assert.equal(2.5, Tensor.from_table(2.5):item())
    assert.same({}, Tensor.from_table(2.5).shape)
  end)

  it("takes empty lists", function()
    assert.same({ 0 }, Tensor.from_table({}).shape)
    assert.same({ 2, 0 }, Tensor.from_table({ {}, {} }).shape)
    assert.same({ {}, {} }, Tensor.from_table({ {}, {} }):to_table())
  end)

  it("rounds to nearest even in bf16 and f16", function()
    local ulp = 2 ^ -7
    local x = Tensor.from_table({ 1 + ulp / 2, 1 + ulp * 1.5, 1 + ulp * 0.51, 3.4e38 }, "bf16")
    assert.same({ 1, 1 + 2 * ulp, 1 + ulp, math.huge }, x:to_table())
    assert.same({ 1, 1 + 2 ^ -9 },
      Tensor.from_table({ 1 + 2 ^ -11, 1 + 3 * 2 ^ -11 }, "f16"):to_table())
  end)

  it("keeps the ends of the integers", function()
    local ends = { -2 ^ 31, 2 ^ 31 - 1 }
    assert.same(ends, Tensor.from_table(ends, "i32"):to_table())
    assert.same({ -2 ^ 53, 2 ^ 53 }, Tensor.from_table({ -2 ^ 53, 2 ^ 53 }, "i64"):to_table())
    assert.same({ 0, 255 }, Tensor.from_table({ 0, 255 }, "u8"):to_table())
  end)

  it("refuses what it would have to change", function()
    raises(function() Tensor.from_table({ 1, 1.5 }, "i32") end,
      "tensor: value 2 is 1.5, wanted a whole number from -2147483648 to 2147483647 for i32")
    raises(function() Tensor.from_table({ 2 ^ 31 }, "i32") end,
      "value 1 is 2147483648, wanted a whole number")
    raises(function() Tensor.from_table({ -1 }, "u8") end,
      "value 1 is -1, wanted a whole number from 0 to 255")
    raises(function() Tensor.from_table({ 0 / 0 }, "i64") end, "value 1 is",
      "wanted a whole number")
    raises(function() Tensor.from_table({ math.huge }, "i64") end,
      "value 1 is inf, wanted a whole number")
    raises(function() Tensor.from_table({ 1, "2" }) end,
      "tensor: value 2 is string, wanted a number")
  end)

  it("refuses ragged lists", function()
    raises(function() Tensor.from_table({ { 1, 2 }, { 3 } }) end,
      "tensor: a list has 1 values, wanted 2 as in its siblings")
    raises(function() Tensor.from_table({ { 1, 2 }, 3 }) end,
      "tensor: a list has no values, wanted 2")
  end)
end)

describe("empty", function()
  it("is dense, with sizes of 0 allowed", function()
    local x = Tensor.empty({ 3, 0, 2 }, "f32")
    assert.equal(0, x:numel())
    assert.is_true(x:is_contiguous())
    assert.same({ {}, {}, {} }, x:to_table())
  end)

  it("refuses shapes and dtypes that are none", function()
    raises(function() Tensor.empty({ 2, -1 }, "f32") end,
      "tensor: dimension 2 is -1, wanted a whole number from 0")
    raises(function() Tensor.empty({ 1.5 }, "f32") end,
      "tensor: dimension 1 is 1.5, wanted a whole number")
    raises(function() Tensor.empty({ "3" }, "f32") end,
      "tensor: dimension 1 is 3, wanted a whole number")
    raises(function() Tensor.empty({ 0 / 0 }, "f32") end, "tensor: dimension 1 is",
      "wanted a whole number")
    raises(function() Tensor.empty({ 1, 1, 1, 1, 1 }, "f32") end,
      "tensor: shape [1,1,1,1,1] has 5 dimensions, wanted at most 4")
    raises(function() Tensor.empty({ 2 ^ 30, 2 ^ 30 }, "f32") end,
      "tensor: [1073741824,1073741824] has too many elements")
    raises(function() Tensor.empty({ 2 }, "f8") end,
      "tensor: dtype is f8, wanted f32, bf16, f16, f64, i32, i64 or u8")
    raises(function() Tensor.foreign(nil, { 2 }, "q4") end, "tensor: dtype is q4, wanted")
  end)

  it("raises at the line that called it", function()
    local message = raises(function() Tensor.empty({ -1 }, "f32") end, "tensor: dimension 1")
    assert.truthy(message:find("spec/tensor_spec.lua:%d+: tensor: dimension"))
  end)
end)

describe("a view", function()
  local x

  before_each(function()
    x = Tensor.from_table({ { 1, 2, 3, 4 }, { 5, 6, 7, 8 }, { 9, 10, 11, 12 } })
  end)

  it("is a row by its number, from 1 or from the end", function()
    assert.same({ 5, 6, 7, 8 }, x[2]:to_table())
    assert.same({ 9, 10, 11, 12 }, x[-1]:to_table())
    assert.equal(11, x[3][3]:item())
  end)

  it("shares its storage", function()
    x[2]:fill_(0)
    x:narrow(2, 4, 1):fill_(-1)
    assert.same({ { 1, 2, 3, -1 }, { 0, 0, 0, -1 }, { 9, 10, 11, -1 } }, x:to_table())
    assert.equal(x.storage, x[1].storage)
  end)

  it("narrows either dimension", function()
    assert.same({ { 5, 6, 7, 8 }, { 9, 10, 11, 12 } }, x:narrow(1, 2, 2):to_table())
    assert.same({ { 2, 3 }, { 6, 7 }, { 10, 11 } }, x:narrow(-1, 2, 2):to_table())
    assert.same({ { 6, 7 } }, x:narrow(1, 2, 1):narrow(2, 2, 2):to_table())
    assert.same({ 0, 4 }, x:narrow(1, 2, 0).shape)
  end)

  it("reshapes, with one size left open", function()
    assert.same({ { 1, 2, 3, 4, 5, 6 }, { 7, 8, 9, 10, 11, 12 } }, x:reshape(2, -1):to_table())
    assert.same({ 12 }, x:reshape(-1).shape)
    assert.same({ 3, 2, 2 }, x:narrow(2, 1, 4):reshape(3, 2, 2).shape)
    assert.same({}, Tensor.from_table({ 7 }):reshape().shape)
    assert.same({ 0, 2 }, Tensor.empty({ 0, 4 }, "f32"):reshape(-1, 2).shape)
  end)

  it("splits the columns of rows that lie apart", function()
    assert.same({ { { 1 }, { 2 } }, { { 5 }, { 6 } }, { { 9 }, { 10 } } },
      x:narrow(2, 1, 2):reshape(3, 2, 1):to_table())
  end)

  it("knows whether it is contiguous", function()
    assert.is_true(x:is_contiguous())
    assert.is_true(x:narrow(1, 2, 2):is_contiguous())
    assert.is_false(x:narrow(2, 1, 2):is_contiguous())
    assert.is_true(x:narrow(2, 1, 2):contiguous():is_contiguous())
    assert.is_true(x:narrow(1, 1, 1):narrow(2, 1, 2):is_contiguous())
    assert.equal(x, x:contiguous())
  end)

  it("refuses what is not there", function()
    raises(function() return x[4] end, "row 4 of a tensor [3,4]")
    raises(function() return x[0] end, "row 0 of a tensor [3,4]")
    raises(function() return x[-4] end, "row -4 of a tensor [3,4]")
    raises(function() return fn.zeros()[1] end, "row 1 of a tensor []")
    raises(function() return x:narrow(1, 3, 2) end,
      "narrow: entries 3 to 4 of dimension 1, wanted them within [3,4]")
    raises(function() return x:narrow(3, 1, 1) end, "narrow: entries 1 to 1 of dimension 3")
    raises(function() return x:narrow(1, 0, 1) end, "narrow: entries 0 to 0")
    raises(function() return x:narrow(1, 1.5, 1) end, "narrow: entries 1.5 to")
    raises(function() return x:reshape(5, 2) end,
      "reshape: tensor is [3,4], wanted 10 elements for the new shape")
    raises(function() return x:reshape(5, -1) end, "reshape: tensor is [3,4], wanted")
    raises(function() return x:reshape(-1, -1) end,
      "reshape: size 2 is -1, wanted a whole number, or -1 once")
    raises(function() return x:reshape(1.5, 8) end, "reshape: size 1 is 1.5, wanted a whole number")
    raises(function() return x:narrow(2, 1, 2):reshape(6) end,
      "reshape: tensor is not contiguous; call contiguous() first")
    raises(function() return x:reshape(1, 1, 1, 3, 4) end,
      "tensor: shape [1,1,1,3,4] has 5 dimensions, wanted at most 4")
  end)

  it("is checked by C for its dimensions before its sizes are read", function()
    for _, ndim in ipairs({ -1, 5 }) do
      local wrong = fn.ones(2)
      wrong.raw.ndim = ndim
      raises(function() return fn.exp(wrong) end,
        ("exp: x has %d dimensions, wanted 0 to 4"):format(ndim))
    end
  end)

  it("says its sizes", function()
    assert.equal(4, x:size(2))
    assert.equal(4, x:size(-1))
    assert.equal(12, x:numel())
  end)
end)

describe("conversion", function()
  it("goes between all dtypes", function()
    local values = { 0, 1, 2, 100 }
    for _, from in ipairs({ "f32", "bf16", "f16", "f64", "i32", "i64", "u8" }) do
      for _, to in ipairs({ "f32", "bf16", "f16", "f64", "i32", "i64", "u8" }) do
        local y = Tensor.from_table(values, from):to(to)
        assert.equal(to, y.dtype)
        assert.same(values, y:to_table())
      end
    end
  end)

  it("is the tensor itself for its own dtype; clone is always a copy", function()
    local x = fn.ones(3)
    assert.equal(x, x:to("f32"))
    local y = x:clone()
    y:fill_(2)
    assert.same({ 1, 1, 1 }, x:to_table())
  end)

  it("copies strided into strided", function()
    local x, y = fn.zeros(3, 4), Tensor.from_table({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, "f64")
    x:narrow(2, 2, 2):copy_(y)
    assert.same({ { 0, 1, 2, 0 }, { 0, 3, 4, 0 }, { 0, 5, 6, 0 } }, x:to_table())
  end)

  it("refuses another shape", function()
    raises(function() fn.zeros(2, 3):copy_(fn.zeros(3, 2)) end, "copy: y is [2,3], wanted [3,2]")
  end)

  it("keeps infinities and NaN", function()
    local x = Tensor.from_table({ math.huge, -math.huge, 0 / 0 })
    for _, dtype in ipairs({ "bf16", "f16", "f64" }) do
      local y = x:to(dtype):to("f32"):to_table()
      assert.same({ math.huge, -math.huge }, { y[1], y[2] })
      assert.is_true(y[3] ~= y[3])
    end
  end)
end)

describe("reading", function()
  it("gives one number of a tensor with one element", function()
    assert.equal(3, fn.full(3, 1, 1):item())
    assert.equal(-2, Tensor.from_table({ -2 }, "i64"):item())
    raises(function() fn.zeros(2):item() end, "item: tensor is [2], wanted one element")
  end)

  it("gives strided and half-precision values", function()
    local x = Tensor.from_table({ { 1, 2 }, { 3, 4 } }, "f16")
    assert.same({ { 2 }, { 4 } }, x:narrow(2, 2, 1):to_table())
    local y = Tensor.from_table({ { 1, 2 }, { 3, 4 } }, "bf16")
    assert.same({ { 2 }, { 4 } }, y:narrow(2, 2, 1):to_table())
  end)

  it("prints shape, dtype and a few values", function()
    assert.equal("f32 [2,2]  1 2.5 3 4", tostring(Tensor.from_table({ { 1, 2.5 }, { 3, 4 } })))
    assert.equal("i32 [8]  1 2 3 4 5 6 ... 8", tostring(helper.ids(1, 2, 3, 4, 5, 6, 7, 8)))
    assert.equal("f32 [1] requires_grad  1", tostring(fn.ones(1):requires_grad_()))
    assert.equal("f32 [0]  ", tostring(fn.zeros(0)))
  end)

  it("gives a pointer of the right type", function()
    local x = Tensor.from_table({ 1.5, 2 }, "bf16")
    assert.is_true(ffi.istype("uint16_t *", x:data()))
    assert.equal(0x3fc0, x:data()[0])
  end)

  it("tells a tensor from other tables", function()
    assert.is_true(Tensor.is(fn.zeros(1)))
    assert.is_false(Tensor.is({ shape = { 1 } }))
  end)
end)

describe("foreign memory", function()
  it("is read in place and keeps its owner", function()
    local data = ffi.new("double[4]", 1, 2, 3, 4)
    local x = Tensor.foreign(data, { 2, 2 }, "f64", data)
    data[3] = 9
    assert.same({ { 1, 2 }, { 3, 9 } }, x:to_table())
    assert.equal(data, x.storage.foreign)
  end)

  it("stages values of every dtype for a device, in compiled loops too", function()
    local lib = require("liger.ffi")
    lib.on_cpu = false -- staging goes through host arrays, as with a GPU
    local ok, message = pcall(function()
      for round = 1, 200 do
        for _, dtype in ipairs({ "f32", "i32", "f64", "i64", "u8" }) do
          local t = Tensor.stage({ 3 }, dtype)
          for i = 0, 2 do
            t:data()[i] = (round + i) % 256
          end
          t:upload()
          for i = 0, 2 do
            assert(tonumber(t:read()[i]) == (round + i) % 256, dtype)
          end
        end
      end
    end)
    lib.on_cpu = true
    assert.is_true(ok, message)
  end)

  -- Runs fn(t) on a staged tensor of 1, 2, 3, 4, as with a GPU.
  local function staged(run)
    local lib = require("liger.ffi")
    lib.on_cpu = false
    local t = Tensor.stage({ 2, 2 }, "f32")
    lib.on_cpu = true
    for i = 0, 3 do
      t:data()[i] = i + 1
    end
    run(t)
  end

  it("brings staged values to the device before a view is taken", function()
    staged(function(t) assert.same({ { 2 }, { 4 } }, t:narrow(2, 2, 1):to_table()) end)
    staged(function(t) assert.same({ 1, 2, 3, 4 }, t:reshape(4):to_table()) end)
    staged(function(t) assert.same({ 3, 4 }, t:row(2):to_table()) end)
    staged(function(t) assert.same({ { 1, 2 }, { 3, 4 } }, t:detach():to_table()) end)
    staged(function(t)
      t:row(1):fill_(9)
      assert.same({ { 9, 9 }, { 3, 4 } }, t:clone():to_table())
    end)
  end)

  it("takes new values for a tensor that was staged, which its views see", function()
    local lib = require("liger.ffi")
    staged(function(t)
      local row = t:row(2)
      lib.on_cpu = false
      t:restage()
      lib.on_cpu = true
      t:data()[2] = 7
      assert.same({ 3, 4 }, row:to_table())
      t:upload()
      assert.same({ 7, 4 }, row:to_table())
    end)
  end)

  it("forgets what the host knew at any write through the storage", function()
    local ops = require("liger.ops")
    local writes = {
      function(t) t:row(2):fill_(9) end,
      function(t) t:detach():row(2):copy_(fn.full(9, 2)) end,
      function(t) ops.copy(fn.full(9, 2), t:row(2)) end,
      function(t) ops.raw.affine(fn.full(8, 2), 1, 1, t:row(2)) end,
    }
    for _, write in ipairs(writes) do
      staged(function(t)
        t:upload()
        write(t)
        -- On the CPU read() is the data itself: what is asked is whether the copy was dropped.
        assert.is_nil(t.storage.mirror)
        helper.close(t:clone(), { { 1, 2 }, { 9, 9 } }, 0)
      end)
    end
    staged(function(t)
      t:upload()
      fn.exp(t:row(1))
      assert.equal(3, t.storage.mirror[2])
    end)
  end)
end)
