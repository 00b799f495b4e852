-- Losses on logits that are there: their edge cases, what is never read, and the same numbers from
-- a head.
local helper = require("spec.helper")
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local close, ids, raises, same = helper.close, helper.ids, helper.raises, helper.same
local NAN, INF = 0 / 0, math.huge

local function leaf(values, dtype)
  return Tensor.from_table(values, dtype or "f64"):requires_grad_()
end

local function eye(size, dtype)
  local rows = {}
  for i = 1, size do
    rows[i] = {}
    for j = 1, size do
      rows[i][j] = i == j and 1 or 0
    end
  end
  return Tensor.from_table(rows, dtype)
end

describe("logprob", function()
  it("divides by the temperature (B44)", function()
    local function at(row, id, temperature)
      return (fn.logprob(Tensor.from_table({ row }), ids(id), { temperature = temperature })):item()
    end
    close(at({ 1, 0 }, 0, 2), -0.474077, 1e-5)
    close(at({ 1, 0 }, 0, 1), -0.313262, 1e-5)
    close(at({ 5, 0 }, 1, 0.01), -500, 1e-5)
  end)

  it("has the bits of the head's, from the head's logits", function()
    for _, dtype in ipairs({ "f32", "f64" }) do
      local x, w = helper.normal(1, { 9, 24 }, dtype), helper.normal(2, { 131, 24 }, dtype)
      local target = ids(3, 0, 130, -100, 77, 12, 64, -100, 1)
      local z = ops.linear_logits(x, w, nil, 1, 0)
      local a, b = { fn.logprob(z, target) }, { fn.linear_logprob(x, w, target) }
      for k = 1, 3 do
        same(a[k], b[k])
      end
    end
  end)

  it("takes any leading dimensions, and several targets a row", function()
    local z = helper.normal(1, { 2, 3, 19 }, "f64")
    local flat = z:reshape(6, 19)
    local one = Tensor.from_table({ { 1, 2, 3 }, { 4, 5, 18 } }, "i32")
    local logp, entropy = fn.logprob(z, one)
    local wanted, h = fn.logprob(flat, one:reshape(6))
    assert.same({ 2, 3 }, logp.shape)
    same(logp:reshape(6), wanted)
    same(entropy:reshape(6), h)
    local many = fn.logprob(flat, Tensor.from_table({ { 1, 4 }, { 2, 2 }, { 3, -100 }, { 4, 0 },
      { -100, 7 }, { 18, 18 } }, "i32"))
    assert.same({ 6, 2 }, many.shape)
    same(many:narrow(2, 1, 1):narrow(1, 1, 4):clone():reshape(4), wanted:narrow(1, 1, 4):clone())
    assert.equal(many[2][1]:item(), many[2][2]:item())
    assert.equal(0, many[3][2]:item())
    assert.equal(0, many[5][1]:item())
  end)

  it("gives a class of probability 0 -inf, and it has a gradient of 0 (B12)", function()
    local z = leaf({ { -INF, 1, 1 }, { -INF, 1, 1 } }, "f32")
    local logp, entropy, lse = fn.logprob(z, ids(1, 2))
    close(logp, { -math.log(2), -math.log(2) }, 1e-6)
    close(entropy, { math.log(2), math.log(2) }, 1e-6)
    close(lse, { 1 + math.log(2), 1 + math.log(2) }, 1e-6)
    fn.sum(logp + entropy):backward()
    close(z.grad, { { 0, 0.5, -0.5 }, { 0, -0.5, 0.5 } }, 1e-6)
    assert.equal(-INF, (fn.logprob(z, ids(0, 1)))[1]:item())
    -- Whole blocks of -inf before the first finite logit.
    local V = 40000
    local long = fn.full(-INF, 1, V)
    long:data()[V - 1], long:data()[V - 2] = 1, 1
    close((fn.logprob(long, ids(V - 1))), { -math.log(2) }, 1e-6)
    close(fn.entropy(long), { math.log(2) }, 1e-6)
  end)

  it("does not read rows without a target, nor gives them anything", function()
    local z = leaf({ { NAN, NAN }, { 1, 0 }, { INF, NAN } }, "f32")
    local logp, entropy, lse = fn.logprob(z, ids(-100, 0, -100))
    for _, y in ipairs({ logp, entropy, lse }) do
      assert.equal(0, y[1]:item())
      assert.equal(0, y[3]:item())
    end
    fn.sum(logp + entropy):backward()
    close(z.grad[1], { 0, 0 }, 0)
    close(z.grad[3], { 0, 0 }, 0)
    assert.is_true(z.grad[2]:read()[0] ~= 0)
  end)

  it("does not read a row again whose gradient is exactly 0, and changes no other's", function()
    for _, dtype in ipairs({ "f32", "bf16", "f64" }) do
      local acc = dtype == "f64" and "f64" or "f32"
      local z, target = helper.normal(1, { 4, 37 }, dtype), ids(5, 36, 0, 5)
      local dlogp = Tensor.from_table({ 0, 0.5, 0, -1 }, acc)
      local logp, entropy, lse = ops.logprob(z, target:reshape(4, 1), 0.7, -100)
      local function gradient(x, d)
        local dx = Tensor.empty(x.shape, dtype):fill_(NAN)
        ops.raw.logprob_backward(d:reshape(4, 1), nil, x, target:reshape(4, 1), entropy, lse, 0.7,
          -100, dx)
        return dx
      end
      local got = gradient(z, dlogp)
      local poisoned = z:clone()
      poisoned[1]:fill_(NAN)
      poisoned[3]:fill_(INF)
      same(gradient(poisoned, dlogp), got, dtype)
      same(got[1]:clone(), fn.zeros(37, dtype))
      same(got[3]:clone(), fn.zeros(37, dtype))
      local full = gradient(z, Tensor.from_table({ 1, 0.5, 2, -1 }, acc))
      same(full[2]:clone(), got[2]:clone())
      same(full[4]:clone(), got[4]:clone())
      assert.is_true(logp[2]:item() < 0)
    end
  end)

  it("passes a NaN on that is in a row that counts", function()
    local z = leaf({ { NAN, 0 }, { 1, 0 } }, "f32")
    local logp = fn.logprob(z, ids(1, 0))
    local first = logp[1]:item()
    assert.is_true(first ~= first)
    close(logp[2], -0.313262, 1e-5)
  end)
end)

describe("entropy", function()
  it("is that of the row at the temperature", function()
    helper.gradients(function(z) return fn.entropy(z, { temperature = 0.8 }) end,
      { helper.normal(1, { 3, 7 }, "f64") })
    close(fn.entropy(fn.zeros(2, 33)), { math.log(33), math.log(33) }, 1e-6)
    assert.same({ 2, 3 }, fn.entropy(fn.zeros(2, 3, 4)).shape)
  end)
end)

describe("cross_entropy", function()
  it("caps only the row's own logits, at any width (B05)", function()
    for _, V in ipairs({ 3, 5, 17, 129, 1025, 32000 }) do
      for _, dtype in ipairs({ "f32", "bf16" }) do
        local z = fn.full(-50, 1, V, dtype)
        close(fn.cross_entropy(z, ids(V - 1), { softcap = 1 }), math.log(V), 1e-6)
      end
    end
  end)

  it("gives +inf and no NaN for a target of probability 0 (B12)", function()
    local z = leaf({ { -INF, 1, 1 }, { -INF, 1, 1 } }, "f32")
    local loss = fn.cross_entropy(z, ids(1, 2), { reduction = "none" })
    close(loss, { math.log(2), math.log(2) }, 1e-6)
    fn.sum(loss):backward()
    close(z.grad, { { 0, -0.5, 0.5 }, { 0, 0.5, -0.5 } }, 1e-6)
    assert.equal(INF, fn.cross_entropy(z, ids(0, -100)):item())
    -- Without weight such a class takes no part in the smoothing.
    local smooth = fn.cross_entropy(z, ids(1, 2),
      { label_smoothing = 0.3, class_weight = Tensor.from_table({ 0, 1, 1 }) })
    close(smooth, (0.7 + 0.3 * 2 / 3) * math.log(2), 1e-6)
  end)

  it("weighs smoothed classes without looking up an ignored label (B03)", function()
    for _, dtype in ipairs({ "f32", "f64" }) do
      local z = leaf({ { 1, 2 }, { 3, 0.4 } }, dtype)
      local o = { class_weight = Tensor.from_table({ 0.2, 0.3 }, dtype), label_smoothing = 0.1 }
      local loss, rows = fn.cross_entropy(z, ids(-100, 1), o)
      close(loss, 2.540451, 1e-6)
      close(rows.loss, { 0, 0.762135 }, 1e-6)
      loss:backward()
      close(z.grad[1], { 0, 0 }, 0)
      o.reduction = "sum"
      close(fn.cross_entropy(z, ids(-100, 1), o), 0.762135, 1e-6)
    end
  end)

  it("adds the z-loss, and gives it by itself (B07)", function()
    local z = leaf({ { 1, 2, 3 } })
    local loss, rows = fn.cross_entropy(z, ids(2), { z_loss = 0.1 })
    close(loss, 1.568784, 1e-6)
    close(rows.z_loss, { 1.161178 }, 1e-6)
    close(rows.lse, { 3.407606 }, 1e-6)
    loss:backward()
    close(z.grad, { { 0.151388, 0.411516, 0.118617 } }, 1e-5)
    assert.is_nil(select(2, fn.cross_entropy(z, ids(2))).z_loss)
  end)

  it("of nothing but ignored rows is 0 in every reduction (B01)", function()
    for _, reduction in ipairs({ "mean", "sum", "none" }) do
      local z = leaf({ { NAN, 1 }, { 2, INF } }, "f32")
      local loss, rows = fn.cross_entropy(z, ids(-100, -100),
        { reduction = reduction, z_loss = 0.1, label_smoothing = 0.1 })
      close(loss, reduction == "none" and { 0, 0 } or { 0 }, 0)
      close(rows.predicted, { -1, -1 }, 0)
      assert.equal(0, rows.accuracy:item())
      fn.sum(loss):backward()
      close(z.grad, { { 0, 0 }, { 0, 0 } }, 0)
    end
    assert.equal(0, (fn.cross_entropy(fn.zeros(0, 5), Tensor.empty({ 0 }, "i32"))):item())
  end)

  it("does not read a row again whose gradient is exactly 0", function()
    local z = leaf({ { 1, 2 }, { 0, 3 } }, "f32")
    local loss = fn.cross_entropy(z, ids(0, 1), { reduction = "none" })
    z:data()[0] = NAN
    loss:backward(Tensor.from_table({ 0, 1 }))
    close(z.grad, { { 0, 0 }, { 0.047426, -0.047426 } }, 1e-4)
  end)

  it("scales each row by its own gradient from above (B16)", function()
    local z = leaf({ { 1, 0 }, { 0, 1 } })
    fn.cross_entropy(z, ids(0, 1), { reduction = "none" }):backward(
      Tensor.from_table({ 1, 0 }, "f64"))
    close(z.grad, { { -0.268941, 0.268941 }, { 0, 0 } }, 1e-5)
  end)

  it("leaves its logits as they are (B17)", function()
    local a = leaf({ { 0, 1 } })
    local p = fn.softmax(a)
    local before = p:clone()
    fn.cross_entropy(p, ids(0)):backward()
    close(a.grad, { { -0.241249, 0.241249 } }, 1e-5)
    same(before, p)
  end)

  it("gives rows that lie apart the bits of dense ones (B14)", function()
    local base = helper.normal(1, { 4, 2, 3 })
    local function gradient_of(z)
      local x = z:detach():requires_grad_()
      local loss = fn.cross_entropy(x, Tensor.from_table({ { 0, 1, 2, 0 }, { 1, 1, 2, 0 } }, "i32"),
        { reduction = "none" })
      fn.sum(loss):backward()
      return loss, x.grad
    end
    local turned = Tensor.view_of(base, 0, { 2, 4, 3 }, { 3, 6, 1 })
    local a, da = gradient_of(turned)
    local b, db = gradient_of(turned:clone())
    same(a, b)
    same(da:clone(), db)
    local thin = Tensor.view_of(base, 0, { 4, 2, 2 }, { 6, 3, 2 })
    raises(function() fn.cross_entropy(thin, fn.zeros(4, 2):to("i32")) end,
      "logits has stride 2 in dimension 3, wanted 1: make it contiguous")
    local labels = Tensor.view_of(ids(0, 9, 1, 9), 0, { 2 }, { 2 })
    raises(function() fn.cross_entropy(base[1], labels) end, "target has stride 2")
    raises(function() fn.cross_entropy(base[1], Tensor.view_of(ids(1), 0, { 2 }, { 0 })) end,
      "target has stride 0")
  end)

  it("is the fused one's loss and gradient, with every option", function()
    for _, dtype in ipairs({ "f32", "f64" }) do
      local acc = dtype
      local w = eye(33, dtype)
      local target = ids(3, -100, 32, 0, 7, 7)
      local options = { label_smoothing = 0.1, z_loss = 0.02, softcap = 3, ignore = -100,
        class_weight = fn.rand(33, acc) }
      local a, b = helper.normal(1, { 6, 33 }, dtype):requires_grad_(),
        helper.normal(1, { 6, 33 }, dtype):requires_grad_()
      local loss, rows = fn.cross_entropy(a, target, options)
      local fused, fused_rows = fn.linear_cross_entropy(b, w, target, options)
      loss:backward()
      fused:backward()
      close(fused, loss, 1e-6)
      close(a.grad, b.grad, 1e-6)
      close(fused_rows.loss, rows.loss, 1e-6)
      close(fused_rows.z_loss, rows.z_loss, 1e-6)
      same(fused_rows.predicted, rows.predicted)
    end
  end)
end)

describe("grpo on logits", function()
  local grpo = require("liger.loss.grpo")

  it("never reads rows that are clipped, masked or without advantage, after the forward", function()
    -- Rows: clipped above, advantage 0, masked, clipped below, kept; ratios 1.5, 1.5, -, 0.5, 1.
    local z = helper.normal(1, { 5, 31 }):requires_grad_()
    local target = ids(4, 30, -100, 17, 0)
    local logp = fn.logprob(z, target)
    local now = helper.values(logp)
    local batch = {
      mask = Tensor.from_table({ 1, 1, 0, 1, 1 }),
      advantage = Tensor.from_table({ 1, 0, 5, -2, 1 }),
      old_logp = Tensor.from_table({
        now[1] - math.log(1.5), now[2] - math.log(1.5), NAN, now[4] - math.log(0.5), now[5],
      }),
    }
    local loss = grpo.token_loss(batch, logp, grpo.options({}))
    for n = 1, 4 do
      z[n]:detach():fill_(NAN)
    end
    fn.masked_sum(loss, batch.mask):backward()
    for n = 1, 4 do
      same(z.grad[n]:clone(), fn.zeros(31), "row " .. n)
    end
    for _, value in ipairs(helper.values(z.grad[5])) do
      assert.is_true(value == value and value ~= 0)
    end
  end)
end)

describe("softmax", function()
  it("adds up to 1, and is exact for logits of thousands", function()
    local y = fn.softmax(Tensor.from_table({ { 4000, 3999, -4000, -INF } }))
    close(y, { { 0.731059, 0.268941, 0, 0 } }, 1e-6)
    close(fn.sum(fn.softmax(helper.normal(1, { 1, 40000 }))), 1, 1e-6)
  end)
end)

describe("the options of losses on logits", function()
  local z, target = fn.ones(1, 3), ids(0)

  it("are refused when unknown or out of range", function()
    raises(function() fn.logprob(z, target, { softcap = 1 }) end, "logprob: unknown option softcap")
    raises(function() fn.entropy(z, { ignore = 1 }) end, "entropy: unknown option ignore")
    raises(function() fn.cross_entropy(z, target, { ignore_index = 1 }) end,
      "cross_entropy: unknown option ignore_index")
    raises(function() fn.cross_entropy(z, target, { reduction = "batchmean" }) end,
      "cross_entropy: reduction is batchmean, wanted mean, sum or none")
    for _, smoothing in ipairs({ -0.1, 1.1, NAN }) do
      raises(function() fn.cross_entropy(z, target, { label_smoothing = smoothing }) end,
        "cross_entropy: label_smoothing is ", ", wanted [0, 1]")
      raises(function()
        fn.linear_cross_entropy(z, fn.ones(2, 3), target, { label_smoothing = smoothing })
      end, "linear_cross_entropy: label_smoothing is ", ", wanted [0, 1]")
      raises(function()
        ops.raw.cross_entropy_backward(fn.ones(1), nil, z, target, nil, fn.ones(1), smoothing, 0,
          -100, fn.ones(1, 3))
      end, "cross_entropy_backward: label_smoothing is ", ", wanted [0, 1]")
    end
    for _, z_loss in ipairs({ -1, NAN, "x" }) do
      raises(function() fn.cross_entropy(z, target, { z_loss = z_loss }) end,
        "cross_entropy: z_loss is ", ", wanted a number from 0")
      raises(function() fn.linear_cross_entropy(z, eye(3), target, { z_loss = z_loss }) end,
        "linear_cross_entropy: z_loss is ", ", wanted a number from 0")
    end
    raises(function() fn.linear_cross_entropy(z, eye(3), target, { scale = "x" }) end,
      "linear_cross_entropy: scale is x, wanted a number")
    raises(function() fn.linear_cross_entropy(z, eye(3), target, { token_scaling = 1 }) end,
      "linear_cross_entropy: token_scaling is 1, wanted true or false")
    for _, temperature in ipairs({ 0, -1, NAN }) do
      raises(function() fn.logprob(z, target, { temperature = temperature }) end,
        "logprob: temperature is ", ", wanted above 0")
      raises(function()
        ops.raw.logprob_backward(fn.ones(1, 1), nil, z, target:reshape(1, 1), fn.ones(1),
          fn.ones(1), temperature, -100, fn.ones(1, 3))
      end, "logprob_backward: temperature is ", ", wanted above 0")
    end
  end)

  it("are refused with targets that are no class", function()
    for _, id in ipairs({ 3, -1 }) do
      local text = ("target[0] is %d, wanted [0, 3) or -100"):format(id)
      raises(function() fn.logprob(z, ids(id)) end, "logprob: " .. text)
      raises(function() fn.cross_entropy(z, ids(id)) end, "cross_entropy: " .. text)
      raises(function()
        fn.linear_cross_entropy(z, eye(3), ids(id), { class_weight = fn.ones(3) })
      end, "linear_cross_entropy: " .. text)
      raises(function()
        ops.raw.logprob_backward(fn.ones(1, 1), nil, z, ids(id):reshape(1, 1), fn.ones(1),
          fn.ones(1), 1, -100, fn.ones(1, 3))
      end, "logprob_backward: " .. text)
      raises(function()
        ops.raw.cross_entropy_backward(fn.ones(1), nil, z, ids(id), nil, fn.ones(1), 0, 0, -100,
          fn.ones(1, 3))
      end, "cross_entropy_backward: " .. text)
    end
  end)

  it("change nothing outside of the tape", function()
    local x = fn.ones(2, 3):requires_grad_()
    assert.is_nil(autograd.no_grad(fn.cross_entropy, x, ids(0, 1)).requires_grad)
  end)
end)

describe("losses on f16 logits", function()
  local N, V = 6, 41
  local target = ids(3, 0, 40, -100, 7, 12)
  local function losses(a, b)
    local acc = a.dtype == "f64" and "f64" or "f32"
    local logp, entropy = fn.logprob(a, target, { temperature = 0.7 })
    local list = {
      fn.sum(logp), fn.sum(entropy), fn.sum(fn.entropy(a)),
      (fn.cross_entropy(a, target, { label_smoothing = 0.1 })),
      fn.sum(fn.softmax(a):to(acc) * b:to(acc)),
    }
    local ce, tvd = ops.ce_tvd(a, b, target, 1.5, -100)
    list[#list + 1] = fn.sum(ce)
    list[#list + 1] = fn.sum(tvd)
    list[#list + 1] = fn.sum((ops.tvd(a, b, target, 1, -100)))
    list[#list + 1] = fn.sum((ops.jsd(a, b, target, 0.3, 2, -100)))
    list[#list + 1] = fn.sum((ops.cosine(a, b, target, 1, -100)))
    return list
  end

  -- A leaf's gradient under the i-th loss, from rows that lie apart.
  local function run(i, dtype)
    local a = helper.strided(helper.to(helper.normal(1, { N, V }, "f16"), dtype), 3)
    local b = helper.to(helper.normal(2, { N, V }, "f16"), dtype)
    a:requires_grad_()
    local loss = losses(a, b)[i]
    loss:backward()
    return loss, a.grad
  end

  it("have the values and, in f32, the gradients of the numbers they are", function()
    for i = 1, 10 do -- the fifth is made of a softmax in f16
      local loss, grad = run(i, "f16")
      local wanted, wanted_grad = run(i, "f64")
      assert.equal("f32", loss.dtype)
      assert.equal("f32", grad.dtype)
      close(loss, wanted, i == 5 and 1e-3 or 1e-5, "loss " .. i)
      close(grad, wanted_grad, i == 5 and 2e-3 or 1e-3, "gradient " .. i)
    end
  end)
end)
