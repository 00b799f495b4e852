local helper = require("spec.helper")
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local memory = require("liger.memory")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local close, raises, same = helper.close, helper.raises, helper.same

local function leaf(values, dtype)
  return Tensor.from_table(values, dtype or "f64"):requires_grad_()
end

-- Gradients of build(leaves...) -> scalar for each input, as plain tensors.
local function gradients(build, ...)
  local leaves = {}
  for i, x in ipairs({ ... }) do
    leaves[i] = helper.to(x, x.dtype):requires_grad_()
  end
  build(unpack(leaves)):backward()
  for i, x in ipairs(leaves) do
    leaves[i] = x.grad
  end
  return unpack(leaves)
end

local x34 = helper.normal(1, { 3, 4 }, "f64")
local y34 = helper.normal(2, { 3, 4 }, "f64")
local w54 = helper.normal(3, { 5, 4 }, "f64")

describe("backward", function()
  it("follows a chain", function()
    local x = leaf({ 1, 2, 3 })
    fn.sum(x * x * x):backward()
    close(x.grad, { 3, 12, 27 })
  end)

  it("adds up a leaf that is used twice", function()
    local x = leaf({ 1, 2 })
    fn.sum(x + x * 3):backward()
    close(x.grad, { 4, 4 })
    local y = leaf({ 5 })
    fn.sum(y + y):backward()
    close(y.grad, { 2 })
  end)

  it("goes through diamonds once a node", function()
    helper.gradients(function(x)
      local a = ops.exp(x * 0.3)
      local b, c = a * 2, ops.sigmoid(a)
      return b * c + a
    end, { x34 })
  end)

  it("shares a residual stream without mixing its gradients up", function()
    helper.gradients(function(x, w)
      local h = x
      for _ = 1, 3 do
        h = h + ops.sigmoid(ops.linear(ops.linear(h, w),
          ops.exp(w * 0.1):contiguous():reshape(4, 5)))
      end
      return h + x
    end, { x34, w54 })
  end)

  it("leaves a gradient alone that an addition passes to both sides", function()
    -- The left side then adds more to its own.
    helper.gradients(function(x, y)
      local a, b = x * 1.5, y * 0.5
      local s = a + b
      return s * s, a * a, ops.exp(b) + a
    end, { x34, y34 })
  end)

  it("adds to .grad over two backwards", function()
    local x = leaf({ 1, 2 })
    fn.sum(x * x):backward()
    fn.sum(x * 3):backward()
    close(x.grad, { 5, 7 })
    x.grad = nil
    fn.sum(x * 3):backward()
    close(x.grad, { 3, 3 })
  end)

  it("reaches only what the result came from", function()
    local x, y = leaf({ 1 }), leaf({ 2 })
    local unused = y * 2
    fn.sum(x * 2):backward()
    close(x.grad, { 2 })
    assert.is_nil(y.grad)
    fn.sum(unused):backward()
    close(y.grad, { 2 })
  end)

  it("takes a gradient from above and leaves it as it was", function()
    local x = leaf({ 1, 2, 3 })
    local above = Tensor.from_table({ 1, 0, 2 }, "f64")
    local y = x * x
    y:backward(above)
    close(x.grad, { 2, 0, 12 })
    same(above, Tensor.from_table({ 1, 0, 2 }, "f64"))
    -- The same one for two graphs whose walks add more to it.
    for _ = 1, 2 do
      local z = leaf({ 1, 1, 1 })
      local sum = z + z
      sum:backward(above)
      close(z.grad, { 2, 0, 4 })
    end
    same(above, Tensor.from_table({ 1, 0, 2 }, "f64"))
  end)

  it("takes a gradient with rows apart", function()
    local x = leaf({ { 1, 2 }, { 3, 4 } })
    local y = x * 2
    y:backward(helper.strided(Tensor.from_table({ { 1, 2 }, { 3, 4 } }, "f64"), 3))
    close(x.grad, { { 2, 4 }, { 6, 8 } })
  end)

  it("refuses a gradient that does not fit", function()
    local y = leaf({ 1, 2 }) * 2
    raises(function() y:backward(fn.ones(3, "f64")) end,
      "backward: gradient is f64 [3], wanted f64 [2]")
    raises(function() y:backward(fn.ones(2)) end, "backward: gradient is f32 [2], wanted f64 [2]")
    raises(function() y:backward(1) end, "backward: gradient is number, wanted a tensor")
  end)

  it("refuses more than one element without a gradient", function()
    raises(function() (leaf({ 1, 2 }) * 2):backward() end,
      "backward: tensor is [2], wanted one element, or a gradient")
  end)

  it("refuses a tensor without a graph", function()
    raises(function() fn.ones(1):backward() end,
      "backward: tensor has no graph; did it come from tensors that require a gradient?")
  end)

  it("refuses a graph that is gone", function()
    local x = leaf({ 1, 2 })
    local y = x * x
    local loss = fn.sum(y)
    loss:backward()
    local message = "backward: this part of the graph was freed by an earlier backward; "
      .. "run the forward again"
    raises(function() loss:backward() end, message)
    raises(function() fn.sum(y * 2):backward() end, message)
    close(x.grad, { 2, 4 })
  end)

  it("works on a leaf itself", function()
    local x = leaf(3)
    x:backward()
    x:backward()
    close(x.grad, 2)
  end)

  it("skips nodes whose outputs got nothing", function()
    -- Both results of a two-output function, one of them unused.
    local x = helper.to(x34, "f64"):requires_grad_()
    local y = ops.rms_norm(x, nil, 1e-6)
    fn.sum(y):backward()
    assert.is_not_nil(x.grad)
  end)
end)

describe("requires_grad_", function()
  it("refuses integers and results", function()
    raises(function() helper.ids(1):requires_grad_() end,
      "requires_grad_: tensor is i32, wanted a float dtype")
    raises(function() (leaf({ 1 }) * 2):requires_grad_() end,
      "requires_grad_: tensor is the result of an op; detach() it first")
    raises(function() leaf({ 1, 2 }):narrow(1, 1, 1):requires_grad_() end,
      "requires_grad_: tensor is the result of an op")
  end)

  it("may be asked for twice", function()
    local x = leaf({ 1 })
    fn.sum(x:requires_grad_() * 2):backward()
    close(x.grad, { 2 })
  end)
end)

describe("no_grad and detach", function()
  it("record nothing inside no_grad", function()
    local x = leaf({ 1, 2 })
    local y = autograd.no_grad(function() return x * x end)
    assert.is_nil(y.requires_grad)
    assert.is_true((x * 1).requires_grad)
  end)

  it("pass on all results", function()
    assert.equal(6, select("#", autograd.no_grad(function() return 1, 2, nil, 4, 5, nil end)))
    assert.same({ 1, 2, 3, 4, 5 }, { autograd.no_grad(function() return 1, 2, 3, 4, 5 end) })
  end)

  it("bring a staged gradient from above to the device", function()
    local x = leaf({ 1, 2 })
    local lib = require("liger.ffi")
    lib.on_cpu = false -- staging goes through host arrays, as with a GPU
    local gradient = Tensor.stage({ 2 }, (x * 1).dtype)
    lib.on_cpu = true
    gradient:data()[0], gradient:data()[1] = 3, 4
    ;(x * 2):backward(gradient)
    close(x.grad, { 6, 8 })
  end)

  it("nest", function()
    autograd.no_grad(function()
      autograd.no_grad(function() end)
      assert.is_false(autograd.state.recording)
    end)
    assert.is_true(autograd.state.recording)
  end)

  it("cut the graph with detach, the data shared", function()
    local x = leaf({ 1, 2, 3 })
    local y = x * x
    fn.sum(y:detach() * x):backward()
    close(x.grad, { 1, 4, 9 })
    y:detach():fill_(0)
    close(y, { 0, 0, 0 })
  end)

  it("record again after reset", function()
    pcall(autograd.no_grad, error, "left")
    assert.is_false(autograd.state.recording)
    autograd.reset()
    assert.is_true(autograd.state.recording)
  end)
end)

describe("the gradient of a view", function()
  local function views(name, build, ...)
    local inputs = { ... }
    it("is right for " .. name .. ", of leaves", function()
      helper.gradients(build, inputs)
    end)
    it("is right for " .. name .. ", of results", function()
      helper.gradients(function(...)
        local results = { ... }
        for i, x in ipairs(results) do
          results[i] = x * 1.25
        end
        return build(unpack(results))
      end, inputs)
    end)
  end

  local x64 = helper.normal(4, { 6, 4 }, "f64")

  views("rows next to each other", function(x)
    return ops.exp(x:narrow(1, 1, 2)), x:narrow(1, 3, 2) * 2, ops.sigmoid(x:narrow(1, 5, 2))
  end, x64)
  views("rows in falling order with a hole", function(x)
    return x:narrow(1, 5, 2) * 2, ops.exp(x:narrow(1, 1, 1))
  end, x64)
  views("rows that overlap", function(x)
    return ops.exp(x:narrow(1, 1, 4)), ops.sigmoid(x:narrow(1, 3, 4))
  end, x64)
  views("rows that overlap inside one op", function(x)
    return x:narrow(1, 1, 4) * x:narrow(1, 2, 4)
  end, x64)
  views("one view twice in one op", function(x)
    local v = x:narrow(1, 2, 3)
    return v * v
  end, x64)
  views("a strided view twice in one op", function(x)
    local v = x:narrow(2, 2, 2)
    return ops.swiglu(v, v)
  end, x64)
  views("a view used three times", function(x)
    local v = x:narrow(1, 2, 3)
    return ops.exp(v), v * 2, ops.sum(v)
  end, x64)
  views("a view and the whole", function(x)
    return ops.exp(x:narrow(1, 2, 3)), ops.sigmoid(x)
  end, x64)
  views("the whole and then a view", function(x)
    return ops.sigmoid(x), ops.exp(x:narrow(1, 2, 3))
  end, x64)
  views("the whole and a view in one op", function(x)
    return x:narrow(1, 1, 6) * x, x:reshape(24):narrow(1, 1, 24) * x:reshape(24)
  end, x64)
  views("columns", function(x)
    return ops.swiglu(x:narrow(2, 1, 2), x:narrow(2, 3, 2))
  end, x64)
  views("columns and rows of one tensor", function(x)
    return ops.swiglu(x:narrow(2, 1, 2), x:narrow(2, 2, 2)), ops.exp(x:narrow(1, 2, 2))
  end, x64)
  views("a view of a view", function(x)
    return ops.exp(x:narrow(1, 2, 4):narrow(1, 2, 2)), x:narrow(1, 2, 4) * 3
  end, x64)
  views("a view of a view in the other dimension", function(x)
    local rows = x:narrow(1, 2, 4)
    return ops.swiglu(rows:narrow(2, 1, 2), rows:narrow(2, 3, 2))
  end, x64)
  views("reshape", function(x)
    return ops.exp(x:reshape(2, 12)), x:reshape(-1) * 2
  end, x64)
  views("reshape of strided rows into heads", function(x)
    local left = x:narrow(2, 1, 2):reshape(6, 2, 1)
    local right = x:narrow(2, 3, 2):reshape(6, 1, 2)
    return ops.swiglu(left, left), ops.swiglu(right, right)
  end, x64)
  views("single rows and elements", function(x)
    return x[1] * x[-1], ops.exp(x[2]), x[3][2] * x[3][2]
  end, x64)
  views("an empty view", function(x)
    return ops.exp(x:narrow(1, 2, 0)), ops.exp(x:narrow(1, 2, 1))
  end, x64)
  views("views as weights", function(x, w)
    local top, rest = w:narrow(1, 1, 2), w:narrow(1, 3, 3)
    return ops.linear(x, top), ops.linear(x, rest), ops.linear(x, w)
  end, x34, w54)
  views("the same view as input and weight", function(x)
    local v = x:narrow(1, 2, 3)
    return ops.linear(v, v)
  end, x64)
  views("views of a norm's weight and a bias", function(x, w)
    return ops.rms_norm(x, w[1], 1e-6), ops.linear(x, w, w:narrow(2, 1, 1):contiguous():reshape(5))
  end, x34, w54)

  it("of a bf16 leaf is gathered in f32", function()
    local x = helper.normal(6, { 4, 4 }, "bf16"):requires_grad_()
    local v = x:narrow(1, 2, 2)
    fn.sum(v * v):backward()
    assert.equal("f32", x.grad.dtype)
    close(x.grad:narrow(1, 2, 2), helper.to(v * 2, "f32"), 1e-2)
    close(x.grad[1], { 0, 0, 0, 0 })
    close(x.grad[4], { 0, 0, 0, 0 })
  end)

  it("is not recorded inside no_grad", function()
    local x = leaf({ 1, 2 })
    assert.is_nil(autograd.no_grad(x.narrow, x, 1, 1, 1).requires_grad)
  end)
end)

describe("the dtype of a gradient", function()
  it("is f32 for a bf16 leaf, f64 for f64", function()
    for dtype, wanted in pairs({ bf16 = "f32", f32 = "f32", f64 = "f64" }) do
      local w = helper.normal(3, { 5, 4 }, dtype):requires_grad_()
      fn.sum(ops.linear(helper.normal(1, { 3, 4 }, dtype), w)):backward()
      assert.equal(wanted, w.grad.dtype)
    end
  end)

  it("keeps 1,000 additions of 1 to a bf16 weight exact (B18)", function()
    local one = fn.ones(1, 1, "bf16")
    local w = fn.full(0.5, 1, 1, "bf16"):requires_grad_()
    for _ = 1, 1000 do
      fn.sum(ops.linear(one, w)):backward()
    end
    assert.equal(1000, w.grad:item())
    -- The same in one call, over rows.
    local v = fn.full(0.5, 1, 1, "bf16"):requires_grad_()
    fn.sum(ops.linear(fn.ones(1000, 1, "bf16"), v)):backward()
    assert.equal(1000, v.grad:item())
    -- And by way of ops that do not know of leaves.
    local u = fn.full(0.5, 1, "bf16"):requires_grad_()
    for _ = 1, 1000 do
      fn.sum(u * 1):backward()
    end
    assert.equal(1000, u.grad:item())
  end)

  it("is the tensor's own inside the graph", function()
    local x = helper.normal(1, { 3, 4 }, "bf16"):requires_grad_()
    local w = helper.normal(3, { 5, 4 }, "bf16"):requires_grad_()
    -- The weight is computed and shared, so its f32 sums meet bf16 ones.
    local v = w * 2
    local y = ops.linear(x, v + v) + ops.linear(x, v)
    fn.sum(y):backward()
    assert.equal("f32", w.grad.dtype)
    local ones = fn.ones(3, 5, "f64")
    local exact = helper.to(x, "f64")
    local want = helper.to(w, "f64"):requires_grad_()
    ops.linear(exact, want * 6):backward(ones)
    close(w.grad, want.grad, 3e-2)
  end)
end)

describe("an op in the tape", function()
  it("does not change its inputs (B17)", function()
    local a = leaf({ { 0, 1 } })
    local p = ops.exp(ops.linear(a, leaf({ { 1, 0 }, { 0, 1 } }):detach()))
    p = p * (1 / (1 + math.exp(1)))
    local before = p:clone()
    local eye = Tensor.from_table({ { 1, 0 }, { 0, 1 } }, "f64")
    local loss = fn.linear_cross_entropy(p, eye, helper.ids(0))
    same(before, p)
    loss:backward()
    same(before, p)
    -- d/da of -log softmax(p)[0] with p = softmax(a), whose normaliser is held fixed above: p' = p.
    local q = { 1 / (1 + math.exp(1)), math.exp(1) / (1 + math.exp(1)) }
    local s = 1 / (1 + math.exp(q[2] - q[1]))
    close(a.grad, { { (s - 1) * q[1], (1 - s) * q[2] } })
  end)

  it("gives the gradient of cross entropy through a softmax (B17)", function()
    local a = leaf({ { 0, 1 } })
    local eye = Tensor.from_table({ { 1, 0 }, { 0, 1 } }, "f64")
    -- softmax(a): e^logp of both classes, from one row given twice.
    local both = ops.linear(Tensor.from_table({ { 1 }, { 1 } }, "f64"), a:reshape(2, 1))
    local logp = fn.linear_logprob(both, eye, helper.ids(0, 1))
    local p = ops.exp(logp):reshape(1, 2)
    local before = p:clone()
    fn.linear_cross_entropy(p, eye, helper.ids(0)):backward()
    close(a.grad, { { -0.241249, 0.241249 } }, 1e-5)
    same(before, p)
  end)

  it("asks only for the gradients that are wanted", function()
    local x, w = helper.to(x34, "f64"), helper.to(w54, "f64"):requires_grad_()
    fn.sum(ops.linear(x, w)):backward()
    assert.is_nil(x.grad)
    local all = gradients(function(v) return fn.sum(ops.linear(x, v)) end, w54)
    same(all, w.grad)
  end)

  it("counts what it saved as free after the walk", function()
    local x = helper.to(x34, "f64"):requires_grad_()
    local y = ops.exp(x)
    local node = y.edge.node
    fn.sum(y):backward()
    assert.is_true(node.freed)
    assert.is_nil(node.y)
  end)
end)

describe("a rule of one's own", function()
  local cube = autograd.rule("cube", function(saved, x)
    saved.x = x
    return x * x * x
  end, function(saved, dy)
    return dy * saved.x * saved.x * 3
  end)

  it("is used like an op", function()
    helper.gradients(function(x) return ops.exp(cube(x) * 0.1) end, { x34 })
    assert.is_nil(cube(x34).requires_grad)
  end)

  it("takes several tensors and other arguments, and knows which gradients are wanted", function()
    local wanted
    local combine = autograd.rule("combine", function(saved, a, factor, b)
      saved.factor = factor
      return a * factor + b, a - b
    end, function(saved, dsum, ddifference)
      wanted = { saved.edges[1] ~= false, saved.edges[2] ~= false }
      local da, db
      if dsum then
        da, db = dsum * saved.factor, dsum
      end
      if ddifference then
        da = da and da + ddifference or ddifference
        db = db and db - ddifference or -ddifference
      end
      return da, db
    end)
    helper.gradients(function(a, b) return combine(a, 3, b) end, { x34, y34 })
    helper.gradients(function(a, b) return (select(2, combine(a, 3, b))) end, { x34, y34 })
    local a = helper.to(x34, "f64"):requires_grad_()
    fn.sum((combine(a, 2, y34))):backward()
    assert.same({ true, false }, wanted)
  end)

  it("may pass its gradient on as it is, or return nil", function()
    local pass = autograd.rule("pass", function(_, x)
      return x * 1
    end, function(_, dy)
      return dy
    end)
    helper.gradients(function(x)
      local y = pass(x)
      return y * 2 + x, ops.exp(y)
    end, { x34 })
    local stop = autograd.rule("stop", function(_, x) return x * 1 end, function() end)
    local x = leaf({ 1, 2 })
    fn.sum(stop(x) + x * 2):backward()
    close(x.grad, { 2, 2 })
  end)

  it("may return its own argument", function()
    local same_tensor = autograd.rule("same_tensor", function(_, x) return x end, function(_, dy)
      return dy * 2
    end)
    local x = leaf({ 1, 2 })
    fn.sum(same_tensor(x) + x):backward()
    close(x.grad, { 3, 3 })
    fn.sum(x * 5):backward()
    close(x.grad, { 8, 8 })
  end)

  it("is refused a gradient of the wrong shape, dtype or kind", function()
    local function wrong(make)
      return function()
        local bad = autograd.rule("bad", function(_, x) return x * 1 end, make)
        fn.sum(bad(leaf({ 1, 2 }) * 1)):backward()
      end
    end
    raises(wrong(function() return fn.ones(3, "f64") end),
      "bad: gradient 1 is f64 [3], wanted f64 [2]")
    raises(wrong(function() return fn.ones(2) end), "bad: gradient 1 is f32 [2], wanted f64 [2]")
    raises(wrong(function() return 1 end), "bad: gradient 1 is number, wanted a tensor")
  end)

  it("may give integers besides", function()
    local with_count = autograd.rule("with_count", function(_, x)
      return x * 2, helper.ids(#x.shape)
    end, function(_, dy)
      return dy * 2
    end)
    local x = leaf({ 1, 2 })
    local y, count = with_count(x)
    assert.equal(1, count:item())
    fn.sum(y):backward()
    close(x.grad, { 2, 2 })
  end)
end)

describe("checkpoint", function()
  local function block(x, w)
    return x + ops.linear(ops.sigmoid(ops.linear(x, w)), (w * 0.5):contiguous():reshape(4, 5))
  end

  local function plain(x, w)
    return fn.sum(ops.exp(block(block(x, w), w) * 0.1))
  end

  local function checkpointed(x, w)
    local h = autograd.checkpoint(block, x, w)
    return fn.sum(ops.exp(autograd.checkpoint(block, h, w) * 0.1))
  end

  it("gives the same bits as without", function()
    for _, dtype in ipairs({ "f64", "f32", "bf16" }) do
      local x, w = helper.to(x34, dtype), helper.to(w54, dtype)
      local dx, dw = gradients(plain, x, w)
      local cx, cw = gradients(checkpointed, x, w)
      same(dx, cx, dtype .. " dx")
      same(dw, cw, dtype .. " dw")
    end
  end)

  it("gives the same bits with views as inputs", function()
    local function run(wrap)
      return function(x, w)
        local h = x * 1
        local a = wrap(block, h:narrow(1, 1, 2), w)
        local b = wrap(block, h:narrow(1, 2, 2), w)
        local c = wrap(ops.exp, h[1])
        return fn.sum(a * b) + fn.sum(c) + fn.sum(h)
      end
    end
    local function call(f, ...) return f(...) end
    local dx, dw = gradients(run(call), x34, w54)
    local cx, cw = gradients(run(autograd.checkpoint), x34, w54)
    same(dx, cx, "dx")
    same(dw, cw, "dw")
  end)

  it("takes views of leaves", function()
    local function run(wrap)
      return function(x)
        return fn.sum(wrap(ops.exp, x:narrow(1, 1, 2))) + fn.sum(wrap(ops.exp, x:narrow(1, 2, 2)))
      end
    end
    same((gradients(run(function(f, v) return f(v) end), x34)),
      (gradients(run(autograd.checkpoint), x34)))
  end)

  it("nests", function()
    local function inner(x, w)
      return autograd.checkpoint(block, x, w)
    end
    local function nested(x, w)
      local y = autograd.checkpoint(function(a, b) return inner(inner(a, b), b) end, x, w)
      return fn.sum(ops.exp(y * 0.1))
    end
    local dx, dw = gradients(plain, x34, w54)
    local cx, cw = gradients(nested, x34, w54)
    same(dx, cx)
    same(dw, cw)
  end)

  it("gives gradients to computed tensors that fn reads from outside", function()
    local function run(wrap)
      return function(x, w)
        local v = w * 2
        local h = wrap(function(a) return ops.sigmoid(ops.linear(a, v)) end, x)
        h = wrap(function(a) return a + ops.linear(x, v) end, h)
        return fn.sum(h) + fn.sum(v * v)
      end
    end
    local function call(f, ...) return f(...) end
    local dx, dw = gradients(run(call), x34, w54)
    local cx, cw = gradients(run(autograd.checkpoint), x34, w54)
    same(dx, cx)
    same(dw, cw)
  end)

  it("may return its argument or a view of it", function()
    local x = leaf({ { 1, 2 }, { 3, 4 } })
    local y = autograd.checkpoint(function(a) return a end, x)
    local z = autograd.checkpoint(function(a) return a:narrow(1, 1, 1) end, x)
    local loss = fn.sum(y * 2) + fn.sum(z * 3)
    loss:backward()
    close(x.grad, { { 5, 5 }, { 2, 2 } })
    fn.sum(x):backward()
    close(x.grad, { { 6, 6 }, { 3, 3 } })
  end)

  it("holds less while it waits", function()
    local x = helper.normal(7, { 256, 64 }):requires_grad_()
    local w = helper.normal(8, { 64, 64 }):requires_grad_()
    local function deep(a, b)
      for _ = 1, 6 do
        a = ops.sigmoid(ops.linear(a, b))
      end
      return a
    end
    local function bytes(forward)
      collectgarbage()
      collectgarbage()
      local before = memory.stats().live
      local y = forward(x, w)
      collectgarbage()
      collectgarbage()
      local held = memory.stats().live - before
      fn.sum(y):backward()
      return held
    end
    local all = bytes(deep)
    local less = bytes(function(a, b) return autograd.checkpoint(deep, a, b) end)
    assert(less <= all / 5, ("%d bytes, %d without"):format(less, all))
  end)

  it("only calls fn where nothing is recorded", function()
    local calls = 0
    autograd.no_grad(function()
      autograd.checkpoint(function(x)
        calls = calls + 1
        return x * 1
      end, leaf({ 1 }))
    end)
    assert.equal(1, calls)
  end)

  it("passes other arguments through", function()
    local x = leaf({ 1, 2 })
    local y = autograd.checkpoint(function(scale, a, _, shift) return a * scale + shift end, 3, x,
      nil, 1)
    close(y, { 4, 7 })
    fn.sum(y):backward()
    close(x.grad, { 3, 3 })
  end)
end)

describe("random graphs", function()
  -- One of the ways to go on from the tensors made so far, all [rows, 4].
  local function grow(pool, random, w)
    local x, y = pool[random(#pool)], pool[random(#pool)]
    local rows = math.min(x:size(1), y:size(1))
    local function top(t)
      local start = random(t:size(1) - rows + 1)
      return t:narrow(1, start, rows)
    end
    local left, right = x:narrow(2, 1, 2), x:narrow(2, 3, 2)
    local ways = {
      function() return top(x) + top(y) end,
      function() return top(x) * top(y) end,
      function() return ops.sigmoid(x) end,
      function() return x:narrow(1, random(x:size(1)), 1) end,
      function() return ops.linear(x, w) end,
      function() return ops.linear(x, w:reshape(2, 8):reshape(4, 4)) end,
      function()
        return ops.linear(ops.swiglu(left, right), ops.swiglu(w:narrow(2, 1, 2), w:narrow(2, 2, 2)))
      end,
      function()
        local function gate(a, b) return ops.sigmoid(a) * b end
        return autograd.checkpoint(gate, top(x), top(y))
      end,
      function() return autograd.checkpoint(ops.linear, x, w) end,
      function() return ops.rms_norm(x, w[random(4)], 1e-6) end,
      function() return x:reshape(-1):reshape(-1, 4) end,
      function() return x * -0.5 + 0.1 end,
    }
    return ways[random(#ways)]()
  end

  -- The same graph for the same seed.
  local function build(seed)
    return function(x, w)
      math.randomseed(seed)
      local pool = { x, x * 1 }
      for _ = 1, 12 do
        pool[#pool + 1] = grow(pool, math.random, w)
      end
      return pool[#pool], pool[#pool - 1], pool[math.random(#pool)]
    end
  end

  it("have the gradients of central differences", function()
    local x, w = helper.normal(11, { 6, 4 }, "f64"), helper.normal(12, { 4, 4 }, "f64")
    for seed = 1, 60 do
      helper.gradients(build(seed), { x, w }, 1e-5)
    end
  end)
end)

describe("linear_cross_entropy's gradient", function()
  local eye = { { 1, 0 }, { 0, 1 } }

  it("is made in the forward, scaled by the option", function()
    local x, w = leaf(eye), leaf(eye)
    local loss, rows = fn.linear_cross_entropy(x, w, helper.ids(0, 1), { scale = 1 })
    close(loss, 2 * 0.313262, 1e-5)
    close(rows.loss, { 0.313262, 0.313262 }, 1e-5)
    loss:backward()
    close(x.grad, { { -0.268941, 0.268941 }, { 0.268941, -0.268941 } }, 1e-5)
  end)

  it("refuses another factor from above (B16)", function()
    local loss = fn.linear_cross_entropy(leaf(eye), leaf(eye), helper.ids(0, 1))
    raises(function() (loss * 2):backward() end,
      "linear_cross_entropy: gradient from above is 2, wanted 1; pass the factor as scale")
  end)

  it("has no gradient through its rows, which linear_logprob has (B16)", function()
    local x, w = leaf(eye), leaf(eye)
    local _, rows = fn.linear_cross_entropy(x, w, helper.ids(0, 1))
    raises(function() rows.loss:backward(Tensor.from_table({ 1, 0 }, "f64")) end,
      "backward: tensor has no graph")
    local a, b = leaf(eye), leaf(eye)
    fn.linear_logprob(a, b, helper.ids(0, 1)):backward(Tensor.from_table({ -1, 0 }, "f64"))
    close(a.grad, { { -0.268941, 0.268941 }, { 0, 0 } }, 1e-5)
    close(b.grad, { { -0.268941, 0 }, { 0.268941, 0 } }, 1e-5)
  end)

  it("refuses a computed weight or bias", function()
    local message = "linear_cross_entropy: weight or bias is computed, wanted a leaf; "
      .. "use linear_logprob"
    raises(function() fn.linear_cross_entropy(leaf(eye), leaf(eye) * 1, helper.ids(0, 1)) end,
      message)
    raises(function()
      fn.linear_cross_entropy(leaf(eye), leaf(eye), helper.ids(0, 1), { bias = leaf({ 0, 0 }) * 1 })
    end, message)
  end)
end)
