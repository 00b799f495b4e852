-- The heads: linear_logits, linear_logprob, linear_cross_entropy, what their rows owe to others,
-- and what compaction leaves out.
local helper = require("spec.helper")
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local close, raises, same = helper.close, helper.raises, helper.same

local function ids(list)
  return Tensor.from_table(list, "i32")
end

-- N rows, some of them ignored.
local function problem(N, C, V, dtype, ignored)
  local target = {}
  for n = 1, N do
    target[n] = ignored and n % ignored == 0 and -100 or n * 7 % V
  end
  return helper.normal(1, { N, C }, dtype), helper.normal(2, { V, C }, dtype), ids(target),
    helper.normal(3, { V }, dtype)
end

-- Values and gradients of fn.linear_logprob with a gradient from above for logp and, perhaps,
-- entropy.
local function run(x, w, target, options, dlogp, dentropy)
  options = options or {}
  local leaves = { helper.to(x, x.dtype):requires_grad_(), helper.to(w, w.dtype):requires_grad_() }
  local bias = options.bias and helper.to(options.bias, x.dtype):requires_grad_()
  local o = {}
  for key, value in pairs(options) do
    o[key] = value
  end
  o.bias = bias
  lib.stats.gemm_rows = 0
  local logp, entropy, lse = fn.linear_logprob(leaves[1], leaves[2], target, o)
  local forward_rows = lib.stats.gemm_rows
  local total = fn.sum(logp * dlogp)
  if dentropy then
    total = total + fn.sum(entropy * dentropy)
  end
  total:backward()
  return {
    logp = logp, entropy = entropy, lse = lse, dx = leaves[1].grad, dw = leaves[2].grad,
      db = bias and bias.grad,
    forward_rows = forward_rows, backward_rows = lib.stats.gemm_rows - forward_rows,
  }
end

describe("the targets that are not ignored", function()
  local x, w = helper.normal(1, { 3, 5 }), helper.normal(2, { 7, 5 })

  -- What the operator is told of their number.
  local function told(target, options)
    local raw, kept = ops.raw.linear_logprob, nil
    ops.raw.linear_logprob = function(...)
      kept = select(8, ...)
      return raw(...)
    end
    local ok, message = pcall(fn.linear_logprob, x, w, target, options)
    ops.raw.linear_logprob = raw
    assert(ok, message)
    return kept
  end

  it("are counted where the host knows them", function()
    local target = ids({ 0, -100, 2 })
    assert.equal("kept", ops.schema.linear_logprob.params[8].name)
    assert.equal(2, told(target))
    target:data()[0] = -100
    assert.equal(1, told(target))
    assert.equal(3, told(ids({ 0, 1, 2 })))
    assert.equal(2, told(ids({ 0, 1, 2 }), { ignore = 0 }))
    assert.equal(-1, told(target:clone()))
    assert.equal(-1, told(ids({ 0, 1, 2, 3 }):narrow(1, 2, 3)))
    target:row(1):fill_(4)
    assert.equal(-1, told(target))
  end)

  it("are counted once, as long as the host's copy stands", function()
    local function as_on_device(call, ...)
      lib.on_cpu = false -- staging goes through a copy
      local y = call(...)
      lib.on_cpu = true
      return y
    end
    local target = as_on_device(Tensor.stage, { 3 }, "i32")
    target:data()[0], target:data()[1], target:data()[2] = 0, -100, 2
    assert.equal(2, told(target))
    target.storage.mirror[0] = -100 -- would be seen if they were counted again
    assert.equal(2, told(target))
    target.storage.mirror[0] = 0
    as_on_device(target.restage, target)
    target:data()[1] = 1
    assert.equal(3, told(target))
    assert.equal(3, told(target, { ignore = -1 }))
    assert.equal(2, told(target, { ignore = 0 }))
    target:row(2):fill_(4)
    assert.equal(-1, told(target))
  end)
end)

describe("linear_logprob", function()
  it("is the log-softmax of the logits, with entropy and lse", function()
    local x = Tensor.from_table({ { 1, 2, 3 } }, "f64")
    local logp, entropy,
      lse = fn.linear_logprob(x,
      Tensor.from_table({ { 1, 0, 0 }, { 0, 1, 0 }, { 0, 0, 1 } }, "f64"), ids({ 2 }))
    close(lse, { 3.407606 }, 1e-6)
    close(logp, { -0.407606 }, 2e-6)
    close(entropy, { 0.832396 }, 2e-6)
  end)

  for _, row in ipairs({
    { "plain", {} },
    { "with a temperature", { temperature = 0.7 } },
    { "with a softcap", { softcap = 3 } },
    { "with all", { temperature = 1.6, softcap = 2.5, bias = true } },
  }) do
    local name, options = row[1], row[2]
    it("has the gradients of logp and entropy, " .. name, function()
      for _, budget in ipairs({ 2 ^ 29, 0 }) do
        local x, w, target, b = problem(6, 5, 7, "f64", 4)
        options.logits_budget = budget
        local function build(a, v, c)
          options.bias = c
          local logp, entropy = fn.linear_logprob(a, v, target, options)
          return logp, entropy
        end
        helper.gradients(build, options.bias and { x, w, b } or { x, w }, 1e-6)
        helper.gradients(function(...) return (build(...)) end,
          options.bias and { x, w, b } or { x, w }, 1e-6)
        helper.gradients(function(...) return (select(2, build(...))) end, { x, w }, 1e-6)
        options.bias = name == "with all"
      end
    end)
  end

  it("gives the frozen input no gradient, nor the frozen weight", function()
    local x, w, target = problem(4, 5, 7, "f64")
    local a = helper.to(x, "f64"):requires_grad_()
    fn.sum((fn.linear_logprob(a, w, target))):backward()
    local v = helper.to(w, "f64"):requires_grad_()
    fn.sum((fn.linear_logprob(x, v, target))):backward()
    local both = run(x, w, target, nil, fn.ones(4, "f64"))
    same(both.dx, a.grad)
    same(both.dw, v.grad)
    assert.is_nil(w.grad)
  end)

  it("agrees when the logits are kept and when they are made again", function()
    for _, dtype in ipairs({ "f32", "f64", "bf16" }) do
      local x, w, target = problem(40, 24, 131, dtype, 5)
      local acc = dtype == "f64" and "f64" or "f32"
      local up, down = helper.normal(4, { 40 }, acc), helper.normal(5, { 40 }, acc)
      local kept = run(x, w, target, { temperature = 0.8, softcap = 9 }, up, down)
      local again = run(x, w, target, { temperature = 0.8, softcap = 9, logits_budget = 0 }, up,
        down)
      for _, key in ipairs({ "logp", "entropy", "lse", "dx", "dw" }) do
        same(kept[key], again[key], dtype .. " " .. key)
      end
    end
  end)

  it("refuses a wrong number of targets", function()
    local x, w, target = problem(6, 5, 7, "f64", 4)
    local told = fn.ge(target:to("f64"), 0)
    local kept = fn.sum(told):item()
    for _, wrong in ipairs({ kept - 1, kept + 1, -2 }) do
      raises(function() ops.linear_logprob(x, w, nil, target, 1, 0, -100, wrong) end,
        ("linear_logprob: kept is %d, wanted %d, the targets that are not ignored"):format(wrong,
          kept))
    end
    same(ops.linear_logprob(x, w, nil, target, 1, 0, -100, kept),
      ops.linear_logprob(x, w, nil, target, 1, 0, -100))
  end)

  it("reduces what linear_logits gives", function()
    local x, w, target, b = problem(9, 16, 70, "f32")
    local o = { temperature = 0.6, softcap = 4, bias = b }
    local logp, _, lse = fn.linear_logprob(x, w, target, o)
    local z = ops.linear_logits(x, w, b, o.temperature, o.softcap)
    for n = 1, 9 do
      local row, most, sum = z[n]:to_table(), -math.huge, 0
      for _, value in ipairs(row) do
        most = math.max(most, value)
      end
      for _, value in ipairs(row) do
        sum = sum + math.exp(value - most)
      end
      close(lse[n]:item(), most + math.log(sum), 1e-6)
      close(logp[n]:item(), row[target[n]:item() + 1] - (most + math.log(sum)), 1e-5)
    end
  end)

  it("divides by the temperature (B44)", function()
    local eye = Tensor.from_table({ { 1, 0 }, { 0, 1 } })
    local function at(x, temperature)
      return (fn.linear_logprob(Tensor.from_table({ x }), eye, ids({ 0 }),
        { temperature = temperature })):item()
    end
    close(at({ 1, 0 }, 2), -0.474077, 1e-5)
    close(at({ 1, 0 }, 1), -0.313262, 1e-5)
    close((fn.linear_logprob(Tensor.from_table({ { 5, 0 } }), eye, ids({ 1 }),
      { temperature = 0.01 })), { -500 }, 1e-5)
    close(at({ 5, 0 }, 0.01), 0, 1e-6)
  end)

  it("caps only the vocabulary's own logits, at any width (B05)", function()
    for _, V in ipairs({ 3, 5, 17, 129, 1025 }) do
      local x, w = fn.ones(1, 1), fn.full(-50, V, 1)
      local logp, entropy = fn.linear_logprob(x, w, ids({ 0 }), { softcap = 1 })
      close(logp, { -math.log(V) }, 1e-6)
      close(entropy, { math.log(V) }, 1e-6)
      local loss = fn.linear_cross_entropy(x, w, ids({ 0 }), { softcap = 1 })
      close(loss, math.log(V), 1e-6)
    end
    local loss = fn.linear_cross_entropy(fn.ones(1, 1), fn.full(-50, 32000, 1), ids({ 31999 }),
      { softcap = 1 })
    close(loss, math.log(32000), 1e-6)
  end)

  it("gives +inf loss and no NaN for a class with probability 0 (B12)", function()
    local x, w = fn.ones(1, 1), Tensor.from_table({ { -math.huge }, { 1 }, { 1 } })
    local logp, entropy, lse = fn.linear_logprob(x, w, ids({ 1 }))
    close(logp, { -math.log(2) }, 1e-6)
    close(entropy, { math.log(2) }, 1e-6)
    close(lse, { 1 + math.log(2) }, 1e-6)
    close((fn.linear_logprob(x, w, ids({ 0 }))), { -math.huge })
    local _, rows = fn.linear_cross_entropy(x, w, ids({ 0 }))
    close(rows.loss, { math.huge })
  end)

  it("gives the -inf class a gradient of exactly 0 (B12)", function()
    local w = Tensor.from_table({ { -math.huge }, { 1 }, { 1 } }):requires_grad_()
    fn.sum((fn.linear_logprob(fn.ones(2, 1), w, ids({ 1, 2 })))):backward()
    close(w.grad, { { 0 }, { 0 }, { 0 } })
    local v = Tensor.from_table({ { -math.huge }, { 1 }, { 1 } }):requires_grad_()
    fn.sum((fn.linear_logprob(fn.ones(1, 1), v, ids({ 1 })))):backward()
    close(v.grad, { { 0 }, { 0.5 }, { -0.5 } }, 1e-6)
  end)

  it("is finite for logits of thousands", function()
    local w = Tensor.from_table({ { 4000 }, { -4000 }, { 3999 } })
    local logp, entropy = fn.linear_logprob(fn.ones(2, 1), w, ids({ 0, 1 }))
    close(logp, { -0.313262, -8000.313262 }, 1e-6)
    close(entropy, { 0.582203, 0.582203 }, 1e-3)
  end)
end)

describe("ignored rows", function()
  it("give 0 everywhere and take no part in the forward", function()
    local x, w, target = problem(32, 8, 19, "f32", 2)
    local got = run(x, w, target, nil, fn.ones(32))
    assert.equal(16, got.forward_rows)
    for n = 2, 32, 2 do
      for _, key in ipairs({ "logp", "entropy", "lse" }) do
        assert.equal(0, got[key][n]:item())
      end
      close(got.dx[n], fn.zeros(8), 0)
    end
  end)

  it("may hold NaN", function()
    local x, w, target = problem(6, 8, 19, "f32", 2)
    x[2]:fill_(0 / 0)
    x[4]:fill_(math.huge)
    local got = run(x, w, target, nil, fn.ones(6), fn.ones(6))
    for _, key in ipairs({ "logp", "entropy", "dx", "dw" }) do
      for _, value in ipairs(helper.values(got[key])) do
        assert(value == value, key .. " is NaN")
      end
    end
  end)

  it("can be all of them (B01)", function()
    local x, w = helper.normal(1, { 2, 2 }), helper.normal(2, { 3, 2 })
    local got = run(x, w, ids({ -100, -100 }), nil, fn.ones(2), fn.ones(2))
    assert.equal(0, got.forward_rows + got.backward_rows)
    for _, key in ipairs({ "logp", "entropy", "lse", "dx", "dw" }) do
      close(got[key], fn.full_like(got[key], 0), 0, key)
    end
    local a, b = helper.to(x, "f32"):requires_grad_(), helper.to(w, "f32"):requires_grad_()
    for _, scale in ipairs({ false, 1, 0.5 }) do
      local loss, rows = fn.linear_cross_entropy(a, b, ids({ -100, -100 }), { scale = scale })
      assert.equal(0, loss:item())
      close(rows.loss, { 0, 0 }, 0)
      close(rows.predicted, { -1, -1 }, 0)
      loss:backward()
    end
    close(a.grad, fn.zeros(2, 2), 0)
    close(b.grad, fn.zeros(3, 2), 0)
  end)

  it("are those of the ignore option", function()
    local x, w = helper.normal(1, { 3, 4 }), helper.normal(2, { 5, 4 })
    local logp = fn.linear_logprob(x, w, ids({ 3, 1, 3 }), { ignore = 3 })
    assert.same({ 0, 0 }, { logp[1]:item(), logp[3]:item() })
    assert.is_true(logp[2]:item() < 0)
    raises(function() fn.linear_logprob(x, w, ids({ 3, -100, 3 }), { ignore = 3 }) end,
      "linear_logprob: target[1] is -100, wanted [0, 5)")
  end)
end)

describe("compaction", function()
  -- Half of the gradients from above are exactly 0.
  local function half(N, dtype)
    local dlogp = helper.normal(4, { N }, dtype)
    for n = 0, N - 1, 2 do
      dlogp:data()[n] = 0
    end
    return dlogp
  end

  it("leaves rows with a gradient of 0 out of the backward", function()
    local x, w, target = problem(64, 16, 50, "f32")
    local all = run(x, w, target, nil, helper.normal(4, { 64 }))
    local some = run(x, w, target, nil, half(64, "f32"))
    local none = run(x, w, target, nil, fn.zeros(64))
    assert.equal(64, all.forward_rows)
    assert.is_true(all.backward_rows > 0)
    assert.equal(all.backward_rows / 2, some.backward_rows)
    assert.equal(0, none.backward_rows)
    close(none.dx, fn.zeros(64, 16), 0)
    close(none.dw, fn.zeros(50, 16), 0)
  end)

  it("does so when logits are made again, and for the forward's product in the backward", function()
    local x, w, target = problem(64, 16, 50, "f32")
    local all = run(x, w, target, { logits_budget = 0 }, helper.normal(4, { 64 }))
    local some = run(x, w, target, { logits_budget = 0 }, half(64, "f32"))
    assert.equal(all.backward_rows / 2, some.backward_rows)
  end)

  it("keeps a row for its entropy's gradient", function()
    local x, w, target = problem(64, 16, 50, "f32")
    local none = fn.zeros(64)
    local by_entropy = run(x, w, target, nil, none, half(64, "f32"))
    local all = run(x, w, target, nil, none, helper.normal(4, { 64 }))
    assert.equal(all.backward_rows / 2, by_entropy.backward_rows)
  end)

  it("changes no bit of dx, and dw only in which rows it sums", function()
    for _, dtype in ipairs({ "f32", "bf16", "f64" }) do
      local acc = dtype == "f64" and "f64" or "f32"
      local x, w, target = problem(48, 16, 50, dtype)
      local dlogp = half(48, acc)
      -- The same rows with a gradient all together: each alone in a batch of its own, nothing left
      -- out.
      local got = run(x, w, target, nil, dlogp)
      local full = run(x, w, target, nil, helper.normal(4, { 48 }, acc))
      for n = 2, 48, 2 do
        same(got.dx[n], full.dx[n], dtype .. " row " .. n)
        close(got.dx[n - 1], fn.zeros(16), 0)
      end
      local exact = run(helper.to(x, "f64"), helper.to(w, "f64"), target, nil,
        helper.to(dlogp, "f64"))
      close(got.dw, exact.dw, dtype == "bf16" and 2e-2 or 1e-5, dtype .. " dw")
    end
  end)

  it("is right over several chunks of rows", function()
    local N = 5000
    local x, w, target = problem(N, 4, 9, "f64", 3)
    local dlogp = half(N, "f64")
    for _, budget in ipairs({ 2 ^ 29, 0 }) do
      local got = run(x, w, target, { logits_budget = budget }, dlogp)
      for _, n in ipairs({ 2, 2048, 2050, 4096, 4100, 5000 }) do
        local one = run(x:narrow(1, n, 1):clone(), w, target:narrow(1, n, 1):clone(),
          { logits_budget = budget },
          dlogp:narrow(1, n, 1):clone())
        same(one.logp, got.logp:narrow(1, n, 1):clone(), "logp of row " .. n)
        same(one.dx, got.dx:narrow(1, n, 1):clone(), "dx of row " .. n)
      end
      local sum = fn.zeros(9, 4, "f64")
      for at = 1, N, 1000 do
        local part = run(x:narrow(1, at, 1000):clone(), w, target:narrow(1, at, 1000):clone(),
          { logits_budget = budget }, dlogp:narrow(1, at, 1000):clone())
        sum = sum + part.dw
      end
      close(got.dw, sum, 1e-12, "dw")
    end
  end)
end)

describe("linear_cross_entropy", function()
  it("has the gradients of its loss", function()
    local weight = fn.rand(7, "f64")
    for _, o in ipairs({
      {}, { scale = 0.3, softcap = 2 }, { bias = true }, { class_weight = weight },
      { label_smoothing = 0.2 }, { z_loss = 0.1, scale = 0.3 },
      { label_smoothing = 0.2, class_weight = weight, z_loss = 0.1, softcap = 2, bias = true },
    }) do
      local x, w, target, b = problem(6, 5, 7, "f64", 4)
      local options = {}
      for key, value in pairs(o) do
        options[key] = value
      end
      local leaves = {}
      for i, t in ipairs({ x, w, b }) do
        leaves[i] = helper.to(t, "f64"):requires_grad_()
      end
      options.bias = o.bias and leaves[3]
      local loss = fn.linear_cross_entropy(leaves[1], leaves[2], target, options)
      loss:backward()
      options.bias = o.bias and b
      for i, t in ipairs({ x, w, o.bias and b }) do
        helper.check_gradient(function()
          return autograd.no_grad(fn.linear_cross_entropy, x, w, target, options):item()
        end, t, leaves[i].grad, 1e-6, "input " .. i)
      end
    end
  end)

  it("weighs rows by the probability of their target, a constant (dft)", function()
    local x, w, target = problem(6, 5, 7, "f64", 4)
    local o = { label_smoothing = 0.2, z_loss = 0.1, scale = 0.3 }
    local _, plain = fn.linear_cross_entropy(x, w, target, o)
    local a, b = helper.to(x, "f64"):requires_grad_(), helper.to(w, "f64"):requires_grad_()
    o.token_scaling = true
    local loss, rows = fn.linear_cross_entropy(a, b, target, o)
    loss:backward()
    local p = ops.exp((fn.linear_logprob(x, w, target)))
    close(rows.loss, plain.loss * p, 1e-12)
    close(rows.z_loss, plain.z_loss * p, 1e-12)
    close(loss, fn.sum(rows.loss) * 0.3, 1e-12)
    -- Row by row the gradient is that of the plain loss, times p.
    o.token_scaling = nil
    for n = 1, 6 do
      o.scale = 0.3 * p[n]:item()
      local row = x:narrow(1, n, 1):clone():requires_grad_()
      fn.linear_cross_entropy(row, w, target:narrow(1, n, 1):clone(), o):backward()
      close(a.grad:narrow(1, n, 1):clone(), target[n]:item() < 0 and fn.zeros(1, 5) or row.grad,
        1e-12)
    end
    -- A target of probability 0 weighs nothing.
    local none = Tensor.from_table({ { -math.huge }, { 1 } })
    local _, got = fn.linear_cross_entropy(fn.ones(1, 1), none, ids({ 0 }),
      { token_scaling = true })
    close(got.loss, { 0 }, 0)
  end)

  it("gives the z-loss, in the loss and by itself (B07)", function()
    local x = Tensor.from_table({ { 1, 2, 3 } }, "f64"):requires_grad_()
    local eye = Tensor.from_table({ { 1, 0, 0 }, { 0, 1, 0 }, { 0, 0, 1 } }, "f64")
    local loss, rows = fn.linear_cross_entropy(x, eye, ids({ 2 }), { z_loss = 0.1 })
    close(loss, 1.568784, 1e-6)
    close(rows.loss, { 1.568784 }, 1e-6)
    close(rows.z_loss, { 1.161178 }, 1e-6)
    loss:backward()
    close(x.grad, { { 0.151388, 0.411516, 0.118617 } }, 1e-5)
    assert.is_nil(select(2, fn.linear_cross_entropy(x:detach(), eye, ids({ 2 }))).z_loss)
  end)

  it("weighs smoothed classes without looking up an ignored label (B03)", function()
    local x = Tensor.from_table({ { 1, 2 }, { 3, 0.4 } }):requires_grad_()
    local loss, rows = fn.linear_cross_entropy(x, Tensor.from_table({ { 1, 0 }, { 0, 1 } }),
      ids({ -100, 1 }),
      { label_smoothing = 0.1, class_weight = Tensor.from_table({ 0.2, 0.3 }) })
    close(loss, 2.540451, 1e-6)
    close(rows.loss, { 0, 0.762135 }, 1e-6)
    loss:backward()
    close(x.grad[1], { 0, 0 }, 0)
  end)

  it("adds 1,000 gradients of 1 to a bf16 weight's without loss (B18)", function()
    -- The target has probability 0, so each row adds exactly -1 to its weight's gradient.
    local w = Tensor.from_table({ { -200 }, { 0 } }, "bf16")
    for _, calls in ipairs({ { 1000, 1 }, { 1, 1000 } }) do
      local v = helper.to(w, "bf16"):requires_grad_()
      for _ = 1, calls[1] do
        fn.linear_cross_entropy(fn.ones(calls[2], 1, "bf16"), v, fn.zeros(calls[2]):to("i32"),
          { scale = 1 })
      end
      close(v.grad, { { -1000 }, { 1000 } }, 0)
    end
  end)

  it("adds to the gradients that are there", function()
    local x, w, target = problem(6, 5, 7, "f64")
    local a, b = helper.to(x, "f64"):requires_grad_(), helper.to(w, "f64"):requires_grad_()
    fn.linear_cross_entropy(a, b, target):backward()
    local first, first_x = b.grad:clone(), a.grad:clone()
    fn.linear_cross_entropy(a, b, target):backward()
    close(b.grad, first * 2, 1e-12)
    close(a.grad, first_x * 2, 1e-12)
  end)

  it("agrees with linear_logprob, and predicts the first of the largest", function()
    for _, dtype in ipairs({ "f32", "bf16" }) do
      local x, w, target = problem(20, 16, 33, dtype, 6)
      local a, v = helper.to(x, dtype):requires_grad_(), helper.to(w, dtype):requires_grad_()
      local loss, rows = fn.linear_cross_entropy(a, v, target, { scale = 1 })
      loss:backward()
      local other = run(x, w, target, nil, fn.full(-1, 20))
      same(other.logp * -1 + 0, rows.loss + 0, "loss")
      same(other.entropy, rows.entropy, "entropy")
      close(a.grad, other.dx, dtype == "bf16" and 1e-2 or 1e-6, "dx")
      close(v.grad, other.dw, dtype == "bf16" and 1e-2 or 1e-6, "dw")
    end
    local _, rows = fn.linear_cross_entropy(fn.ones(2, 1),
      Tensor.from_table({ { 1 }, { 3 }, { 3 } }), ids({ 0, -100 }))
    close(rows.predicted, { 1, -1 }, 0)
  end)

  it("predicts as linear_logprob does, which has the same bits where it is not asked to", function()
    for _, dtype in ipairs({ "f32", "bf16", "f64" }) do
      for _, cap in ipairs({ 0, 5 }) do
        local x, w, target = problem(20, 16, 33, dtype, 6)
        x, w = helper.to(x, dtype), helper.to(w, dtype)
        local _, rows = fn.linear_cross_entropy(x, w, target, { softcap = cap })
        local outputs = { fn.linear_logprob(x, w, target, { softcap = cap, predicted = true }) }
        same(rows.predicted, outputs[4], dtype)
        for i, y in ipairs({ fn.linear_logprob(x, w, target, { softcap = cap }) }) do
          same(y, outputs[i], dtype)
        end
      end
    end
    local _, _, _, predicted = fn.linear_logprob(fn.ones(3, 1),
      Tensor.from_table({ { 1 }, { 3 }, { 3 } }), ids({ 0, -100, 2 }), { predicted = true })
    close(predicted, { 1, -1, 1 }, 0)
  end)

  it("makes no gradient where none is recorded", function()
    local x, w, target = problem(4, 5, 7, "f32")
    local v = helper.to(w, "f32"):requires_grad_()
    autograd.no_grad(fn.linear_cross_entropy, x, v, target)
    assert.is_nil(v.grad)
  end)
end)

describe("a row", function()
  local N = 100

  -- Row n alone gives the bits that it has among N rows, on any number of threads.
  local function alone(what, call)
    it("of " .. what .. " has the same bits alone, in a batch, and on any number of threads",
      function()
      for _, dtype in ipairs({ "f32", "bf16", "f64" }) do
        local all = {}
        helper.with_threads({ 1, 2, 3 }, function(threads)
          all[threads] = { call(1, N, dtype) }
        end)
        for k, y in ipairs(all[1]) do
          same(y, all[2][k], dtype .. " on 2 threads")
          same(y, all[3][k], dtype .. " on 3 threads")
          for _, n in ipairs({ 1, 2, 50, 99, 100 }) do
            local one = { call(n, 1, dtype) }
            same(y:narrow(1, n, 1):clone(), one[k], ("%s row %d"):format(dtype, n))
          end
          local some = { call(31, 37, dtype) }
          same(y:narrow(1, 31, 37):clone(), some[k], dtype .. " rows 31 to 67")
        end
      end
    end)
  end

  local function rows_of(stream, shape, dtype, first, count)
    return helper.normal(stream, shape, dtype):narrow(1, first, count):clone()
  end

  local C, V = 72, 203

  alone("linear", function(first, count, dtype)
    return ops.linear(rows_of(1, { N, C }, dtype, first, count), helper.normal(2, { V, C }, dtype),
      helper.normal(3, { V }, dtype))
  end)

  alone("linear's dx", function(first, count, dtype)
    local x = rows_of(1, { N, C }, dtype, first, count):requires_grad_()
    ops.linear(x,
      helper.normal(2, { V, C }, dtype)):backward(rows_of(4, { N, V }, dtype, first, count))
    return helper.to(x.grad, dtype)
  end)

  alone("linear_logits", function(first, count, dtype)
    return ops.linear_logits(rows_of(1, { N, C }, dtype, first, count),
      helper.normal(2, { V, C }, dtype), nil, 0.9, 30)
  end)

  local function target_of(first, count)
    local list = {}
    for n = first, first + count - 1 do
      list[#list + 1] = n % 4 == 0 and -100 or n * 13 % V
    end
    return ids(list)
  end

  alone("linear_logprob", function(first, count, dtype)
    return fn.linear_logprob(rows_of(1, { N, C }, dtype, first, count),
      helper.normal(2, { V, C }, dtype), target_of(first, count), { softcap = 30 })
  end)

  for what, options in pairs({
    linear_cross_entropy = { scale = 0.01 },
    ["linear_cross_entropy with options"] = { scale = 0.01, label_smoothing = 0.1, z_loss = 0.01,
      token_scaling = true },
  }) do
    alone(what, function(first, count, dtype)
      local x = rows_of(1, { N, C }, dtype, first, count):requires_grad_()
      local w, target = helper.normal(2, { V, C }, dtype), target_of(first, count)
      local loss, rows = fn.linear_cross_entropy(x, w, target, options)
      loss:backward()
      return rows.loss, rows.entropy, rows.predicted, helper.to(x.grad, dtype)
    end)
  end

  for _, name in ipairs({ "logprob", "cross_entropy" }) do
    alone(name .. " and its gradient", function(first, count, dtype)
      local x = rows_of(1, { N, V }, dtype, first, count):requires_grad_()
      local y = fn[name](x, target_of(first, count), name == "cross_entropy"
        and { reduction = "none", label_smoothing = 0.1, softcap = 2 } or { temperature = 0.7 })
      y:backward(rows_of(4, { N }, y.dtype, first, count))
      return y:detach(), helper.to(x.grad, dtype)
    end)
  end

  alone("softmax and its gradient", function(first, count, dtype)
    local x = rows_of(1, { N, V }, dtype, first, count):requires_grad_()
    local y = fn.softmax(x)
    y:backward(rows_of(4, { N, V }, dtype, first, count))
    return y:detach(), helper.to(x.grad, dtype)
  end)

  alone("linear_logprob's dx", function(first, count, dtype)
    local x = rows_of(1, { N, C }, dtype, first, count):requires_grad_()
    local acc = dtype == "f64" and "f64" or "f32"
    fn.linear_logprob(x, helper.normal(2, { V, C }, dtype),
      target_of(first, count)):backward(rows_of(4, { N }, acc, first, count))
    return helper.to(x.grad, dtype)
  end)

  alone("rms_norm", function(first, count, dtype)
    return ops.rms_norm(rows_of(1, { N, C }, dtype, first, count), helper.normal(2, { C }, dtype),
      1e-6)
  end)

  alone("swiglu", function(first, count, dtype)
    return ops.swiglu(rows_of(1, { N, C }, dtype, first, count),
      rows_of(2, { N, C }, dtype, first, count))
  end)

  alone("rope", function(first, count, dtype)
    local acc = dtype == "f64" and "f64" or "f32"
    local position = {}
    for i = 1, count do
      position[i] = first + i
    end
    return ops.rope(rows_of(1, { N, 3, 8 }, dtype, first, count),
      helper.normal(2, { N + 2, 4 }, acc),
      helper.normal(3, { N + 2, 4 }, acc), ids(position))
  end)

  alone("sample", function(first, count, dtype)
    local z = rows_of(1, { N, V }, dtype, first, count)
    local sequence, position = {}, {}
    for i = 1, count do
      sequence[i], position[i] = first + i, (first + i) * 3
    end
    return ops.sample(z, Tensor.from_table(sequence, "i64"), ids(position), 7, 20, 0.9, 0)
  end)
end)

describe("attention", function()
  local H, G, D = 4, 2, 16

  local function qkv(N, dtype)
    return helper.normal(1, { N, H, D }, dtype), helper.normal(2, { N, G, D }, dtype),
      helper.normal(3, { N, G, D }, dtype)
  end

  -- Without options, and with windows that end within and at panels of keys.
  local function options_of(dtype)
    local sinks = helper.normal(4, { H }, dtype)
    return {
      { window = 0, softcap = 0 },
      { window = 21, softcap = 2, sinks = sinks },
      { window = 32, softcap = 0 },
    }
  end

  it("gives a sequence the same bits alone, packed, and on any number of threads", function()
    local lengths, N = { 1, 37, 5, 130, 27 }, 200
    local cu = { 0 }
    for i, n in ipairs(lengths) do
      cu[i + 1] = cu[i] + n
    end
    for _, dtype in ipairs({ "f32", "bf16", "f64" }) do
      local q, k, v = qkv(N, dtype)
      for _, o in ipairs(options_of(dtype)) do
        local function attend(a, b, c, starts)
          return ops.attention(a, b, c, ids(starts), o.sinks, 0.25, true, o.window, o.softcap)
        end
        local all = {}
        helper.with_threads({ 1, 2, 3 }, function(threads)
          all[threads] = { attend(q, k, v, cu) }
        end)
        for i = 1, 2 do
          same(all[1][i], all[2][i], dtype .. " on 2 threads")
          same(all[1][i], all[3][i], dtype .. " on 3 threads")
        end
        for i, n in ipairs(lengths) do
          local function part(x)
            return x:narrow(1, cu[i] + 1, n):clone()
          end
          local y, lse = attend(part(q), part(k), part(v), { 0, n })
          same(part(all[1][1]), y, dtype .. " sequence " .. i)
          same(part(all[1][2]), lse, dtype .. " lse " .. i)
          -- A prefix of it, too: rows do not see what comes after.
          local m = math.ceil(n / 2)
          local prefix = attend(part(q):narrow(1, 1, m), part(k):narrow(1, 1, m),
            part(v):narrow(1, 1, m), { 0, m })
          same(y:narrow(1, 1, m):clone(), prefix, dtype .. " prefix of " .. i)
        end
      end
    end
  end)

  it("repeats each key head for its own queries (B59)", function()
    local q = fn.ones(1, 4, 2, "f64")
    local k = fn.zeros(1, 2, 2, "f64")
    local v = Tensor.from_table({ { { 1, 2 }, { 3, 4 } } }, "f64"):requires_grad_()
    local y = ops.attention(q, k, v, ids({ 0, 1 }), nil, 1, true, 0, 0)
    close(y, { { { 1, 2 }, { 1, 2 }, { 3, 4 }, { 3, 4 } } })
    y:backward(Tensor.from_table({ { { 1, 10 }, { 2, 20 }, { 3, 30 }, { 4, 40 } } }, "f64"))
    close(v.grad, { { { 3, 30 }, { 7, 70 } } })
  end)

  it("decodes the bits of its last row, for any page size", function()
    local lengths, most = { 1, 7, 64, 100, 33 }, 100
    local function check(dtype, page_size, o)
      local pages = math.ceil(most / page_size)
      local slots = pages * #lengths * page_size
      local k_cache, v_cache = fn.full(0 / 0, slots, G, D, dtype),
        fn.full(0 / 0, slots, G, D, dtype)
      local queries, wanted, table_of = {}, {}, {}
      for b, n in ipairs(lengths) do
        local q = helper.normal(10 + b, { n, H, D }, dtype)
        local k, v = helper.normal(20 + b, { n, G, D }, dtype),
          helper.normal(30 + b, { n, G, D }, dtype)
        -- Pages of the sequences lie between each other, last page first.
        table_of[b] = {}
        for p = 1, pages do
          table_of[b][p] = (pages - p) * #lengths + b - 1
        end
        local slot = {}
        for j = 0, n - 1 do
          slot[j + 1] = table_of[b][math.floor(j / page_size) + 1] * page_size + j % page_size
        end
        ops.cache_write(k, v, ids(slot), k_cache, v_cache)
        local y = ops.attention(q, k, v, ids({ 0, n }), o.sinks, 0.3, true, o.window, o.softcap)
        queries[b], wanted[b] = q[n], y[n]
      end
      local q = Tensor.empty({ #lengths, H, D }, dtype)
      for b = 1, #lengths do
        q[b]:copy_(queries[b])
      end
      helper.with_threads({ 1, 2 }, function()
        local y = ops.attention_decode(q, k_cache, v_cache, Tensor.from_table(table_of, "i32"),
          ids(lengths), o.sinks, page_size, 0.3, o.window, o.softcap)
        for b = 1, #lengths do
          same(y[b]:clone(), wanted[b]:clone(),
            ("%s, page size %d, window %d, sequence %d"):format(dtype, page_size, o.window, b))
        end
      end)
    end
    for _, dtype in ipairs({ "f32", "bf16", "f64" }) do
      for _, page_size in ipairs({ 1, 3, 16, 64, 128 }) do
        for _, o in ipairs(options_of(dtype)) do
          check(dtype, page_size, o)
        end
      end
    end
  end)
end)

describe("sampled log-probabilities", function()
  it("have the bits of training's, from the same hidden states (B44)", function()
    for _, dtype in ipairs({ "f32", "bf16" }) do
      for _, o in ipairs({ { temperature = 1, softcap = 0 },
        { temperature = 0.7, softcap = 20 } }) do
        local x, w = helper.normal(1, { 6, 32 }, dtype), helper.normal(2, { 150, 32 }, dtype)
        local z = ops.linear_logits(x, w, nil, o.temperature, o.softcap)
        local id, logp = fn.sample(z, Tensor.from_table({ 1, 2, 3, 4, 5, 6 }, "i64"),
          ids({ 0, 1, 2, 3, 4, 5 }), { seed = 3 })
        same(logp, (fn.linear_logprob(x, w, id, o)), dtype)
      end
    end
  end)
end)
