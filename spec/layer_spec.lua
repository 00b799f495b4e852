-- The layers that models are made of: what the recorded numbers and the cases of spec/cases do not
-- show.
local helper = require("spec.helper")
local fn = require("liger.fn")
local ops = require("liger.ops")
local rope = require("liger.nn.rope")
local Tensor = require("liger.tensor")

local close, raises, same = helper.close, helper.raises, helper.same

local function normal(stream, shape, dtype)
  return helper.normal(stream, shape, dtype):requires_grad_()
end

-- The gradients of build(leaves...) under fixed weightings, each of a fresh leaf.
local function gradients_of(build, dtype, shapes)
  local leaves = {}
  for i, shape in ipairs(shapes) do
    leaves[i] = normal(i, shape, dtype)
  end
  helper.weighted({ build(unpack(leaves)) }):backward()
  local list = {}
  for i, x in ipairs(leaves) do
    list[i] = x.grad
  end
  return list
end

-- Two ways to the same outputs, with the same bits in them and in the gradients.
local function agree(one, other, dtype, shapes)
  local leaves = {}
  for i, shape in ipairs(shapes) do
    leaves[i] = helper.normal(i, shape, dtype)
  end
  local a, b = { one(unpack(leaves)) }, { other(unpack(leaves)) }
  for i, y in ipairs(b) do
    same(a[i], y, "output " .. i)
  end
  a, b = gradients_of(one, dtype, shapes), gradients_of(other, dtype, shapes)
  for i, dx in ipairs(b) do
    same(a[i], dx, "gradient " .. i)
  end
end

describe("rms_norm", function()
  it("counts the weight from the offset (B56)", function()
    local x = Tensor.from_table({ { 3, 4 } })
    local function at(offset)
      local w = fn.zeros(2):requires_grad_()
      local y = ops.rms_norm(x, w, 1e-6, offset, false)
      fn.sum(y):backward()
      return y, w.grad
    end
    local y, dw = at(1)
    close(y, { 0.848528, 1.131371 })
    close(dw, { 0.848528, 1.131371 })
    y, dw = at(0)
    close(y, { 0, 0 })
    close(dw, { 0.848528, 1.131371 })
  end)

  it("adds the offset to a bf16 weight in fp32 (B57)", function()
    -- In bf16 the sums would be 16.75 and 1: the first row tells the products by the one apart, the
    -- second those by the other.
    local rows = { { 0.72265625, 1.21875 }, { 0.71875, 1.21875 } }
    local function scaled(a, b)
      local y = {}
      for i, x in ipairs(rows) do
        local rstd = ((x[1] ^ 2 + x[2] ^ 2) / 2 + 1e-6) ^ -0.5
        y[i] = { x[1] * rstd * a, x[2] * rstd * b }
      end
      return helper.to(Tensor.from_table(y, "f64"), "bf16")
    end
    local w = Tensor.from_table({ 15.8125, 0.00390625 }, "bf16")
    local y = ops.rms_norm(Tensor.from_table(rows, "bf16"), w, 1e-6, 1, false)
    same(y, scaled(16.8125, 1.00390625))
    local rounded = scaled(16.75, 1):to_table()
    assert.is_true(y:to_table()[1][1] ~= rounded[1][1] and y:to_table()[2][2] ~= rounded[2][2])
  end)

  it("is Llama's where offset and rounding are not said", function()
    local x, w = helper.normal(1, { 5, 48 }, "bf16"), helper.normal(2, { 48 }, "bf16")
    local y = ops.rms_norm(x, w, 1e-6)
    same(y, (ops.rms_norm(x, w, 1e-6, 0, true)))
    assert.is_false(helper.is_same(y, (ops.rms_norm(x, w, 1e-6, 0, false))))
  end)
end)

describe("add_rms_norm", function()
  it("is an addition and a norm, with their bits", function()
    for _, dtype in ipairs({ "f32", "bf16", "f64" }) do
      local x, r, w = helper.normal(1, { 70, 33 }, dtype), helper.normal(2, { 70, 33 }, dtype),
        helper.normal(3, { 33 }, dtype)
      local s, y, rstd = ops.add_rms_norm(x, r, w, 1e-6, 1, false)
      same(s, x + r)
      local wanted, wanted_rstd = ops.rms_norm(s, w, 1e-6, 1, false)
      same(y, wanted)
      same(rstd, wanted_rstd)
    end
    agree(function(x, r, w)
      local s, y = ops.add_rms_norm(x, r, w, 1e-6)
      return s, y
    end, function(x, r, w)
      local s = x + r
      return s, (ops.rms_norm(s, w, 1e-6))
    end, "f32", { { 70, 33 }, { 70, 33 }, { 33 } })
  end)

  it("has the gradients of whatever is used of it", function()
    local function check(build, count)
      local inputs = {}
      for i = 1, count do
        inputs[i] = helper.normal(i, { 4, 6 }, "f64")
      end
      helper.gradients(build, inputs)
    end
    local w = helper.normal(9, { 6 }, "f64")
    check(function(x, r) return (ops.add_rms_norm(x, r, w, 1e-6)) end, 2) -- s alone
    check(function(x, r) return (select(2, ops.add_rms_norm(x, r, nil, 1e-6))) end, 2)
    check(function(x)
      local s, y = ops.add_rms_norm(x, x, w, 1e-6) -- both are one tensor
      return s, y
    end, 1)
    check(function(x, r) -- computed inputs, each used elsewhere too
      local a, b = ops.exp(x), r * 2
      local s, y = ops.add_rms_norm(a, b, w, 1e-6)
      return s * y, a * b
    end, 2)
    check(function(x) -- views of one tensor; a weight that is computed
      local s, y = ops.add_rms_norm(x:narrow(1, 1, 2), x:narrow(1, 3, 2), ops.exp(w), 1e-6)
      return s, y
    end, 1)
    check(function(v) -- a constant on one side
      local s, y = ops.add_rms_norm(fn.ones(4, 6, "f64"), v, w, 1e-6)
      return s, y
    end, 1)
  end)
end)

describe("layer_norm", function()
  it("takes the variance about the mean (B58)", function()
    local x = Tensor.from_table({ { 10000, 10001, 10002, 10003 } })
    close((ops.layer_norm(x, nil, nil, 1e-5)), { -1.341635, -0.447212, 0.447212, 1.341635 }, 1e-5)
  end)

  it("keeps its statistics in fp32 for bf16 rows", function()
    local x = helper.normal(1, { 3, 40 }, "bf16")
    local y, mean, rstd = ops.layer_norm(x, nil, nil, 1e-5)
    assert.same({ "bf16", "f32", "f32" }, { y.dtype, mean.dtype, rstd.dtype })
  end)
end)

describe("qk_norm_rope", function()
  local N, H, D = 30, 3, 32

  local function tables(dtype)
    return rope.tables(rope.from_config({ partial_rotary_factor = 0.75 }, D), N, dtype)
  end

  it("is a norm and a rotation, with their bits, on the heads of a fused matrix", function()
    local cos, sin = tables("f32")
    local at = {}
    for n = 1, N do
      at[n] = n * 7 % N
    end
    local position = helper.ids(unpack(at))
    local function heads(qkv)
      return qkv:narrow(2, D + 1, H * D):reshape(N, H, D)
    end
    agree(function(qkv, w)
      return (ops.qk_norm_rope(heads(qkv), w, cos, sin, position, 1e-6, 1))
    end, function(qkv, w)
      return (ops.rope((ops.rms_norm(heads(qkv), w, 1e-6, 1, false)), cos, sin, position))
    end, "f32", { { N, (H + 2) * D }, { D } })
  end)

  it("refuses positions, tables and heads that it cannot take", function()
    local x, w, cos = fn.ones(1, 1, 4), fn.ones(4), fn.ones(3, 2)
    raises(function() ops.qk_norm_rope(x, w, cos, cos, helper.ids(3), 1e-6) end,
      "qk_norm_rope: position[0] is 3, wanted [0, 3)")
    raises(function() ops.qk_norm_rope(x, w, fn.ones(3, 3), fn.ones(3, 3), helper.ids(0), 1e-6) end,
      "qk_norm_rope: cos has 3 pairs, wanted at most 2")
    raises(function()
      ops.qk_norm_rope(fn.ones(1, 1, 1026), fn.ones(1026), cos, cos, helper.ids(0), 1e-6)
    end, "qk_norm_rope: head size is 1026, wanted at most 1024")
  end)
end)

describe("rope", function()
  it("turns interleaved pairs as it turns the halves of a sorted head", function()
    local N, R = 6, 4
    local cos, sin = rope.tables(rope.from_config({}, 2 * R), N, "f32")
    local x, sorted = helper.normal(1, { N, 1, 2 * R }), Tensor.empty({ N, 1, 2 * R }, "f32")
    local function sort(from, to)
      for n = 0, N - 1 do
        for i = 0, R - 1 do
          to:data()[n * 2 * R + i] = from:data()[n * 2 * R + 2 * i]
          to:data()[n * 2 * R + i + R] = from:data()[n * 2 * R + 2 * i + 1]
        end
      end
      return to
    end
    local position = helper.ids(0, 1, 2, 3, 4, 5)
    local turned = ops.rope(x, cos, sin, position, true)
    close(sort(turned, fn.zeros(N, 1, 2 * R)), ops.rope(sort(x, sorted), cos, sin, position))
  end)
end)

describe("rope_planes", function()
  it("with one position for all planes gives that position's row", function()
    local table_of = helper.normal(1, { 9, 6 })
    local position = helper.ids(4, 8, 0, 4, 8, 0):reshape(2, 3)
    local y = ops.rope_planes(table_of, position, rope.planes({ 2, 4 }))
    same(y, ops.embedding(table_of, helper.ids(4, 8, 0)))
  end)

  it("refuses positions and planes that are not there", function()
    local t, plane = fn.ones(3, 2), helper.ids(0, 1)
    raises(function() ops.rope_planes(t, helper.ids(0, 3):reshape(2, 1), plane) end,
      "rope_planes: position[1] is 3, wanted [0, 3)")
    raises(function() ops.rope_planes(t, helper.ids(0):reshape(1, 1), plane) end,
      "rope_planes: plane[1] is 1, wanted [0, 1)")
  end)
end)

describe("rope.planes", function()
  it("gives blocks, or takes turns while a section lasts", function()
    assert.same({ 0, 0, 1, 1, 1, 2 }, rope.planes({ 2, 3, 1 }):to_table())
    assert.same({ 0, 1, 2, 0, 1, 0, 0, 0 }, rope.planes({ 5, 2, 1 }, true):to_table())
    assert.same({ 0, 1, 2, 0, 1, 2, 0 }, rope.planes({ 2, 3, 2 }, true):to_table())
    raises(function() rope.planes({ 2, 1.5 }) end,
      "rope.planes: section 2 is 1.5, wanted a whole number from 0")
  end)
end)

describe("gated activations", function()
  it("read both halves of one matrix and write both halves of its gradient", function()
    local function halves(x)
      return x:narrow(2, 1, 20), x:narrow(2, 21, 20)
    end
    for _, name in ipairs({ "swiglu", "geglu" }) do
      agree(function(x)
        return ops[name](halves(x))
      end, function(x)
        local gate, up = halves(x)
        return ops[name](gate:clone(), up:clone())
      end, "f32", { { 7, 40 } })
    end
  end)

  it("multiply the gate before and the product after", function()
    local gate, up = helper.normal(1, { 3, 9 }, "f64"), helper.normal(2, { 3, 9 }, "f64")
    close(ops.swiglu(gate, up, 0.5, 3), ops.swiglu(gate * 0.5, up) * 3, 1e-14)
    same(ops.swiglu(gate, up), ops.swiglu(gate, up, 1, 1))
  end)

  it("of geglu are the exact form unless the approximation is asked for", function()
    local x, one = Tensor.from_table({ 1, -1, 30, -30 }, "f64"), fn.ones(4, "f64")
    close(ops.geglu(x, one), { 0.841344746, -0.158655254, 30, 0 }, 1e-9)
    close(ops.geglu(x, one, true), { 0.841191991, -0.158808009, 30, 0 }, 1e-9)
  end)
end)

describe("relu_squared", function()
  it("keeps NaN and has no slope at 0", function()
    local x = Tensor.from_table({ 0 / 0, 0, -2, 3 }):requires_grad_()
    local y = ops.relu_squared(x)
    close(y, { 0 / 0, 0, 0, 9 }, 0)
    fn.sum(y):backward()
    close(x.grad, { 0 / 0, 0, 0, 6 }, 0)
  end)
end)

describe("embedding", function()
  it("uses the padding's row, gives it no gradient, and refuses one that is not there", function()
    local w = Tensor.from_table({ { 1, 2 }, { 3, 4 } }):requires_grad_()
    local y = ops.embedding(w, helper.ids(1, 0, 1), 1)
    close(y, { 3, 4, 1, 2, 3, 4 }, 0)
    fn.sum(y):backward()
    close(w.grad, { 1, 1, 0, 0 }, 0)
    for _, index in ipairs({ 2, -2 }) do
      raises(function() ops.embedding(w, helper.ids(0), index) end,
        ("embedding: padding_idx is %d, wanted [-1, 2)"):format(index))
    end
  end)
end)
