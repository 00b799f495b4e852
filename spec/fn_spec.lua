local helper = require("spec.helper")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local close, raises, same = helper.close, helper.raises, helper.same

local function vector(...)
  return Tensor.from_table({ ... }, "f64")
end

local NAN = 0 / 0

describe("making tensors", function()
  it("fills with a value, in a dtype", function()
    close(fn.full(0.5, 2, 2), { { 0.5, 0.5 }, { 0.5, 0.5 } }, 0)
    assert.equal("bf16", fn.zeros(3, "bf16").dtype)
    close(fn.ones(2, "i64"), { 1, 1 }, 0)
    assert.same({}, fn.zeros().shape)
    local x = fn.full_like(fn.zeros(2, 3, "f64"), 7)
    assert.same({ "f64", 7 }, { x.dtype, x[2][3]:item() })
  end)

  it("refuses sizes that are none", function()
    raises(function() fn.zeros({ 2 }) end, "full: size 1 is table, wanted a number")
    raises(function() fn.randn(2, {}, 3) end, "randn: size 2 is table, wanted a number")
    raises(function() fn.rand(true) end, "rand: size 1 is boolean, wanted a number")
    raises(function() fn.zeros(2.5) end, "tensor: dimension 1 is 2.5, wanted a whole number from 0")
    raises(function() fn.zeros(2, "f8") end, "tensor: dtype is f8, wanted")
  end)

  it("draws the same numbers after the same seed, others after another", function()
    fn.manual_seed(5)
    local a, b = fn.randn(100), fn.rand(100)
    fn.manual_seed(5)
    same(a, fn.randn(100))
    same(b, fn.rand(100))
    assert.is_false(helper.is_same(fn.randn(100), fn.randn(100)))
    fn.manual_seed(6)
    assert.is_false(helper.is_same(a, fn.randn(100)))
    raises(function() fn.manual_seed(1.5) end, "manual_seed: seed is 1.5, wanted a whole number")
    raises(function() fn.manual_seed("x") end, "manual_seed: seed is x, wanted a whole number")
  end)

  it("draws normal and uniform numbers", function()
    fn.manual_seed(1)
    local n = 100000
    local x, u = fn.randn(n, "f64"), fn.rand(n, "f64")
    assert.is_true(math.abs(fn.mean(x):item()) < 0.02)
    assert.is_true(math.abs(fn.mean(x * x):item() - 1) < 0.02)
    assert.is_true(math.abs(fn.mean(u):item() - 0.5) < 0.01)
    assert.is_true(math.abs(fn.mean(u * u):item() - 1 / 3) < 0.01)
    local above, most = 0, 0
    for _, value in ipairs(helper.values(u)) do
      above = above + ((value > 0 and value <= 1) and 1 or 0)
    end
    for _, value in ipairs(helper.values(x)) do
      most = math.max(most, math.abs(value))
    end
    assert.equal(n, above)
    assert.is_true(most > 3.5 and most < 6.8)
  end)

  it("does not depend on how the numbers are asked for", function()
    local long, short = Tensor.empty({ 1000 }, "f32"), Tensor.empty({ 7 }, "f32")
    for _, draw in ipairs({
      function(y) ops.random_normal(3, 4, 0, 1, y) end,
      function(y) ops.random_uniform(3, 4, y) end,
    }) do
      draw(long)
      draw(short)
      same(short, long:narrow(1, 1, 7):clone())
    end
  end)
end)

describe("arithmetic", function()
  local a, b = vector(1, 2, 4), vector(3, -1, 0.5)

  it("takes tensors and numbers on either side", function()
    close(a + b, { 4, 1, 4.5 }, 0)
    close(a + 1, { 2, 3, 5 }, 0)
    close(1 + a, { 2, 3, 5 }, 0)
    close(a - b, { -2, 3, 3.5 }, 0)
    close(a - 1, { 0, 1, 3 }, 0)
    close(1 - a, { 0, -1, -3 }, 0)
    close(a * b, { 3, -2, 2 }, 0)
    close(a * 2, { 2, 4, 8 }, 0)
    close(2 * a, { 2, 4, 8 }, 0)
    close(a / b, { 1 / 3, -2, 8 }, 1e-15)
    close(a / 2, { 0.5, 1, 2 }, 0)
    close(2 / a, { 2, 1, 0.5 }, 1e-15)
    close(-a, { -1, -2, -4 }, 0)
    close(a ^ 2, { 1, 4, 16 }, 0)
  end)

  it("has the gradients of its forms with numbers", function()
    helper.gradients(function(x)
      return x + 1, 1 + x, x - 2, 2 - x, x * 3, 3 * x, x / 4, 4 / x, -x, x ^ 3, x:sqrt(),
        fn.affine(x, 2, 5)
    end, { a })
  end)

  it("refuses shapes that differ and dtypes that differ", function()
    raises(function() return a + vector(1, 2) end, "add: b is [2], wanted [3]")
    raises(function() return a * fn.ones(3) end, "mul: b is f32, wanted f64 as a")
    raises(function() return a + "x" end, "add: b is string x, wanted a tensor")
    raises(function() return fn.exp(helper.ids(1)) end, "exp: x is i32, wanted f32, bf16 or f64")
  end)

  it("compares and picks the smaller and the larger", function()
    close(fn.minimum(a, b), { 1, -1, 0.5 }, 0)
    close(fn.maximum(a, 2), { 2, 2, 4 }, 0)
    close(fn.minimum(2, a), { 1, 2, 2 }, 0)
    close(fn.lt(a, b), { 1, 0, 0 }, 0)
    close(fn.le(a, 2), { 1, 1, 0 }, 0)
    close(fn.gt(a, 2), { 0, 0, 1 }, 0)
    close(fn.ge(2, a), { 1, 1, 0 }, 0)
    close(a:eq(2), { 0, 1, 0 }, 0)
    assert.is_nil(fn.lt(helper.to(a, "f64"):requires_grad_(), b).requires_grad)
  end)

  it("gives NaN where either is NaN", function()
    local x = vector(1, NAN)
    close(fn.minimum(x, 5), { 1, NAN }, 0)
    close(fn.maximum(vector(NAN, NAN), x), { NAN, NAN }, 0)
    close(x:clamp(0, 2), { 1, NAN }, 0)
    close(fn.lt(x, 5), { 1, 0 }, 0)
  end)

  it("refuses arguments that it would not use", function()
    raises(function() return a:sum(1) end, "sum: argument 2 is 1, wanted none after x")
    raises(function() return a:mean(1) end, "mean: argument 2 is 1, wanted none after x")
    raises(function() return fn.masked_sum(a, a, 1) end,
      "masked_sum: argument 3 is 1, wanted none after mask")
    raises(function() return fn.masked_mean(a, a, 1) end,
      "masked_mean: argument 3 is 1, wanted none after mask")
    raises(function() return a:sqrt(false) end, "sqrt: argument 2 is false, wanted none after x")
    raises(function() return a:topk(1, 1) end, "topk: argument 2 is 1, wanted none after k")
    raises(function() return ops.linear(a, a, nil, 1) end,
      "linear: argument 4 is 1, wanted none after b")
  end)

  it("has the stated gradients at kinks", function()
    local x, y = vector(1, 2):requires_grad_(), vector(1, 3):requires_grad_()
    fn.sum(fn.minimum(x, y)):backward()
    close(x.grad, { 0.5, 1 }, 0)
    close(y.grad, { 0.5, 0 }, 0)
    local z = vector(-1, 1, 2, 0):requires_grad_()
    fn.sum(z:clamp(-1, 1)):backward()
    close(z.grad, { 1, 1, 0, 1 }, 0)
    local w = vector(0, -2):requires_grad_()
    fn.sum(w:abs()):backward()
    close(w.grad, { 0, -1 }, 0)
  end)

  it("neither overflows nor loses log sigmoid at the ends", function()
    local x = vector(-800, 0, 800)
    close(x:log_sigmoid(), { -800, -math.log(2), 0 }, 1e-12)
    close(x:sigmoid(), { 0, 0.5, 1 }, 1e-12)
    local y = Tensor.from_table({ -200, 200 }):requires_grad_()
    fn.sum(y:log_sigmoid()):backward()
    close(y.grad, { 1, 0 }, 1e-6)
  end)
end)

describe("where and masks", function()
  it("does not read what it does not choose", function()
    local mask = vector(1, 0, 1)
    close(fn.where(mask, vector(1, NAN, 3), vector(NAN, 5, NAN)), { 1, 5, 3 }, 0)
    close(fn.where(mask, 7, vector(NAN, 5, NAN)), { 7, 5, 7 }, 0)
    close(fn.where(mask, vector(1, NAN, 3), 0), { 1, 0, 3 }, 0)
    close(fn.where(mask, 1, -1), { 1, -1, 1 }, 0)
  end)

  it("keeps NaN out of the gradient too", function()
    local x = vector(1, 2, 3):requires_grad_()
    local bad = x * vector(1, NAN, 1)
    fn.sum(fn.where(vector(1, 0, 1), bad, 0)):backward()
    local grad = x.grad:to_table()
    assert.same({ 1, 1 }, { grad[1], grad[3] })
  end)

  it("sums and averages what is kept, whatever is masked (B39)", function()
    local loss, mask = vector(1, NAN, 3), vector(1, 0, 1)
    close(fn.masked_sum(loss, mask), 4, 0)
    close(fn.masked_mean(loss, mask), 2, 0)
    local x = vector(1, NAN, 3):requires_grad_()
    fn.masked_mean(x, mask):backward()
    close(x.grad, { 0.5, 0, 0.5 }, 0)
  end)

  it("keeps a masked NaN out of a policy loss (B39)", function()
    local logp = vector(0, 0):requires_grad_()
    local ratio = (logp - vector(0, NAN)):exp()
    local loss = fn.masked_mean(-fn.minimum(ratio, ratio:clamp(0.8, 1.2)), vector(1, 0))
    close(loss, -1, 0)
    loss:backward()
    local grad = logp.grad:to_table()
    assert.equal(-1, grad[1])
  end)

  it("shows a NaN that is kept (B39)", function()
    local mean = fn.masked_mean(vector(1, NAN), vector(1, 1)):item()
    assert.is_true(mean ~= mean)
  end)

  it("gives 0 and a gradient of 0 for an empty mask", function()
    local x = vector(1, NAN, 3):requires_grad_()
    local mean = fn.masked_mean(x, vector(0, 0, 0))
    assert.equal(0, mean:item())
    mean:backward()
    close(x.grad, { 0, 0, 0 }, 0)
    assert.equal(0, fn.mean(fn.zeros(0)):item())
  end)

  it("counts a bf16 mask exactly", function()
    local n = 1001
    local mean = fn.masked_mean(fn.ones(n, "bf16"), fn.ones(n, "bf16"))
    close(mean, 1, 1e-2)
    local x = fn.zeros(1001, "bf16"):requires_grad_()
    fn.masked_mean(x, fn.ones(n, "bf16")):backward()
    close(x.grad[1], 1 / 1001, 1e-5)
  end)
end)

describe("sums", function()
  it("are in double", function()
    local x = fn.full(0.1, 1000003)
    close(fn.sum(x), 0.10000000149 * 1000003, 1e-7)
    local y = Tensor.from_table({ 1e8, 1, -1e8, 1 })
    assert.equal(2, fn.sum(y):item())
    assert.equal(0, fn.sum(fn.zeros(0)):item())
  end)

  it("go by sequence", function()
    close(fn.segment_sum(vector(1, 2, 3, 4), helper.ids(0, 1, 1, 4)), { 1, 0, 9 }, 0)
    raises(function() fn.segment_sum(vector(1, 2), helper.ids(0, 3)) end,
      "segment_sum: cu_seqlens[1] is 3")
    raises(function() fn.segment_sum(vector(1, 2), helper.ids(1, 0)) end,
      "segment_sum: cu_seqlens[1] is 0")
  end)

  it("of squares reach far beyond fp32 (B95)", function()
    local x = fn.full(1e20, 100)
    close(math.sqrt(ops.sum_squares(x):item()), 1e21, 1e-6)
  end)
end)

describe("gather and embedding", function()
  it("refuse an index that is not there, and leave the output as it was", function()
    raises(function() fn.gather(vector(1, 2), helper.ids(0, 2)) end,
      "gather: index[1] is 2, wanted [0, 2)")
    raises(function() fn.gather(vector(1, 2), helper.ids(-1)) end,
      "gather: index[0] is -1, wanted [0, 2)")
    raises(function() ops.embedding(fn.ones(3, 2), helper.ids(1, 3)) end,
      "embedding: ids[1] is 3, wanted [0, 3)")
    raises(function() ops.embedding(fn.ones(3, 2), helper.ids(-100)) end,
      "embedding: ids[0] is -100, wanted [0, 3)")
  end)
end)

describe("an op's own refusals", function()
  local x = fn.ones(2, 2, 4)
  local function attend(cu, heads)
    return function()
      local k = fn.ones(2, heads or 1, 4)
      ops.attention(x, k, k, cu, nil, 1, true, 0, 0)
    end
  end
  local function attend_with(causal, window, softcap)
    return function()
      local k = fn.ones(2, 1, 4)
      ops.attention(x, k, k, helper.ids(0, 2), nil, 1, causal, window, softcap)
    end
  end
  local function decode(page, length, page_size, window, softcap)
    local cache = fn.ones(6, 1, 4)
    return function()
      ops.attention_decode(x, cache, cache, Tensor.from_table(page, "i32"), length, nil, page_size,
        1, window or 0, softcap or 0)
    end
  end
  local function adamw(beta1, beta2, step)
    local p = fn.zeros(1)
    return function() ops.adamw(p, 1, 0.1, beta1, beta2, 1e-8, 0, step, p:clone(), p:clone(),
      p:clone()) end
  end

  for _, row in ipairs({
    { attend(helper.ids(1, 2)), "attention: cu_seqlens[0] is 1, wanted 0" },
    { attend(helper.ids(0, 2, 1, 2)), "attention: cu_seqlens[2] is 1, wanted at least 2" },
    { attend(helper.ids(0, 1)), "attention: cu_seqlens ends at 1, wanted 2" },
    { attend(helper.ids(0, 3)), "attention: cu_seqlens ends at 3, wanted 2" },
    { attend(helper.ids(0, 2), 3), "attention: heads are 2, wanted a multiple of 3" },
    { attend_with(true, -1, 0), "attention: window is -1, wanted 0 or more" },
    { attend_with(false, 2, 0), "attention: window is 2, wanted 0 where causal is false" },
    { attend_with(true, 0, -1), "attention: softcap is -1, wanted 0 or more" },
    { attend_with(true, 0, 0 / 0), "wanted 0 or more" },
    { attend_with(true, 0, math.huge), "attention: softcap is inf, wanted 0 or more" },
    { decode({ { 0 }, { 1 } }, helper.ids(2, 3), 3, -1),
      "attention_decode: window is -1, wanted 0 or more" },
    { decode({ { 0 }, { 1 } }, helper.ids(2, 3), 3, 0, -2),
      "attention_decode: softcap is -2, wanted 0 or more" },
    { decode({ { 0 }, { 1 } }, helper.ids(2, 3), 0),
      "attention_decode: page_size is 0, wanted above 0" },
    { decode({ { 0 }, { 1 } }, helper.ids(2, 4), 3),
      "attention_decode: length[1] is 4, wanted [1, 3]" },
    { decode({ { 0 }, { 1 } }, helper.ids(0, 3), 3),
      "attention_decode: length[0] is 0, wanted [1, 3]" },
    { decode({ { 0 }, { 2 } }, helper.ids(2, 3), 3),
      "attention_decode: page[1,0] is 2, wanted [0, 2)" },
    { decode({ { -1 }, { 1 } }, helper.ids(2, 3), 3),
      "attention_decode: page[0,0] is -1, wanted [0, 2)" },
    { adamw(1, 0.9, 1), "adamw: beta1 is 1, wanted [0, 1)" },
    { adamw(0.9, -0.1, 1), "adamw: beta2 is -0.1, wanted [0, 1)" },
    { adamw(0.9, 0.9, 0), "adamw: step is 0, wanted at least 1" },
    { function()
      local N = fn.ones(1)
      ops.raw.linear_logprob_backward(N, N, fn.ones(1, 2), fn.ones(3, 2), nil, helper.ids(0), nil,
        N, 1, 0,
        -100, nil, nil, fn.zeros(3, 2), nil)
    end, "linear_logprob_backward: entropy is NULL, wanted that of the forward" },
  }) do
    it("are " .. row[2], function()
      raises(row[1], row[2])
    end)
  end
end)

describe("the device", function()
  it("is refused by a name that is none", function()
    local printed = helper.run_lua([[
      require("liger.device").name = "tpu"
      print(pcall(require, "liger.ffi"))
    ]])
    assert.truthy(printed:find("device: name is tpu, wanted auto, cpu or cuda:N", 1, true), printed)
  end)
end)

describe("a failed op", function()
  it("leaves what it updates in place as it was", function()
    local k, v = helper.normal(1, { 2, 1, 4 }), helper.normal(2, { 2, 1, 4 })
    local k_cache, v_cache = helper.normal(3, { 3, 1, 4 }), helper.normal(4, { 3, 1, 4 })
    local k_before, v_before = k_cache:clone(), v_cache:clone()
    raises(function() ops.cache_write(k, v, helper.ids(0, 3), k_cache, v_cache) end,
      "cache_write: slot[1] is 3, wanted [0, 3)")
    raises(function() ops.cache_copy(helper.ids(0, 1), helper.ids(2, -1), k_cache, v_cache) end,
      "cache_copy: to[1] is -1, wanted [0, 3)")
    same(k_before, k_cache)
    same(v_before, v_cache)
    local dw = fn.ones(3, 2)
    raises(function() ops.raw.embedding_backward(fn.ones(2, 2), helper.ids(0, 3), -1, dw) end,
      "embedding_backward: ids[1] is 3, wanted [0, 3)")
    close(dw, fn.ones(3, 2), 0)
    local w = fn.ones(3, 2):requires_grad_()
    w.grad = fn.ones(3, 2)
    raises(function() fn.linear_cross_entropy(fn.ones(2, 2), w, helper.ids(0, 3)) end,
      "linear_cross_entropy: target[1] is 3, wanted [0, 3)")
    close(w.grad, fn.ones(3, 2), 0)
  end)
end)

describe("topk", function()
  it("gives values and 0-based positions, of equals the lower first", function()
    local values, indices = vector(1, 5, 5, 3):topk(3)
    assert.same({ 5, 5, 3 }, values)
    assert.same({ 1, 2, 3 }, indices)
    assert.same({ 1 }, (vector(1):topk(4)))
    raises(function() fn.ones(2, 2):topk(1) end, "topk: tensor is [2,2], wanted one dimension")
  end)
end)

describe("the heads' options", function()
  local x, w, target = fn.ones(1, 2), fn.ones(3, 2), helper.ids(0)

  it("are refused when unknown or of another head", function()
    raises(function() fn.linear_logprob(x, w, target, { temprature = 2 }) end,
      "linear_logprob: unknown option temprature")
    raises(function() fn.linear_logprob(x, w, target, { scale = 2 }) end,
      "linear_logprob: unknown option scale")
    raises(function() fn.linear_cross_entropy(x, w, target, { temperature = 2 }) end,
      "linear_cross_entropy: unknown option temperature")
    raises(function() fn.linear_cross_entropy(x, w, target, { logits_budget = 1 }) end,
      "linear_cross_entropy: unknown option logits_budget")
    local one = Tensor.from_table({ 1 }, "i64")
    raises(function() fn.sample(x, one, helper.ids(0), { topk = 3 }) end,
      "sample: unknown option topk")
  end)

  it("are refused out of range", function()
    for _, temperature in ipairs({ 0, -1, NAN }) do
      raises(function() fn.linear_logprob(x, w, target, { temperature = temperature }) end,
        "linear_logprob: temperature is ", ", wanted above 0")
    end
    raises(function() fn.linear_logprob(x, w, target, { softcap = "x" }) end,
      "softcap is x, wanted a number")
    raises(function() fn.linear_logprob(x, w, helper.ids(3)) end,
      "linear_logprob: target[0] is 3, wanted [0, 3)")
    raises(function() fn.linear_cross_entropy(x, w, helper.ids(-1)) end,
      "linear_cross_entropy: target[0] is -1, wanted [0, 3)")
  end)
end)

describe("sample", function()
  local ROWS = 3000

  -- The set of ids that rows of the same logits give, and the first draw's log-probability.
  local function kept(logits, options, rows)
    rows = rows or ROWS
    local z, sequence, position = {}, {}, {}
    for b = 1, rows do
      z[b], sequence[b], position[b] = logits, b, b % 7
    end
    local id, logp = fn.sample(Tensor.from_table(z), Tensor.from_table(sequence, "i64"),
      Tensor.from_table(position, "i32"), options)
    local seen, list = {}, {}
    for _, value in ipairs(helper.values(id)) do
      seen[value] = true
    end
    for value in pairs(seen) do
      list[#list + 1] = value
    end
    table.sort(list)
    return list, logp, id
  end

  it("keeps the token that crosses top_p, at least one, and all at 1 (B78)", function()
    local z = { 1, 2, 3 }
    assert.same({ 2 }, kept(z, { top_p = 0 }))
    assert.same({ 2 }, kept(z, { top_p = 1e-9 }))
    assert.same({ 1, 2 }, kept(z, { top_p = 0.7 }))
    assert.same({ 0, 1, 2 }, kept(z, { top_p = 1 }))
  end)

  it("takes top_k 0 and below as off (B80)", function()
    local z = { 1, 2, 3 }
    assert.same({ 0, 1, 2 }, kept(z, { top_k = 0 }))
    assert.same({ 0, 1, 2 }, kept(z, { top_k = -1 }))
    assert.same({ 1, 2 }, kept(z, { top_k = 2 }))
    assert.same({ 0, 1, 2 }, kept(z, { top_k = 5 }))
  end)

  it("is argmax when greedy, the lowest id among equals, other cuts or not (B81)", function()
    local z = { 1, 3, 3 }
    assert.same({ 1 }, kept(z, { greedy = true }))
    assert.same({ 1 }, kept(z, { greedy = true, top_k = 2, top_p = 0.9 }))
    local x, w = fn.ones(1, 1), Tensor.from_table({ { 1 }, { 3 }, { 3 } })
    raises(function() ops.linear_logits(x, w, nil, -1, 0) end,
      "linear_logits: temperature is -1, wanted above 0")
    local cold = ops.linear_logits(x, w, nil, 1e-6, 0)
    local id, logp = fn.sample(cold, Tensor.from_table({ 1 }, "i64"), helper.ids(0), {})
    assert.is_true(id:item() ~= 0)
    close(logp, { -math.log(2) }, 1e-6)
  end)

  it("keeps exactly k among equals, the lower ids, in any batch (B82)", function()
    for _, rows in ipairs({ 1, 8, ROWS }) do
      local seen, _, id = kept({ 2, 1, 1, 0 }, { top_k = 2, seed = 4 }, rows)
      for _, value in ipairs(seen) do
        assert.is_true(value == 0 or value == 1)
      end
      local _, _, all = kept({ 2, 1, 1, 0 }, { top_k = 2, seed = 4 })
      same(id, all:narrow(1, 1, rows):clone())
    end
    assert.same({ 0, 1 }, kept({ 2, 1, 1, 0 }, { top_k = 2 }))
    assert.same({ 0 }, kept({ 2, 1, 1, 0 }, { top_k = 1 }))
    local half = helper.to(Tensor.from_table({ { 2, 1, 1, 0 } }), "bf16")
    local id = fn.sample(half, Tensor.from_table({ 1 }, "i64"), helper.ids(0), { top_k = 2 })
    assert.is_true(id:item() <= 1)
  end)

  it("refuses NaN, +inf and rows without a finite logit (B83)", function()
    raises(function() kept({ 0, NAN, 1 }, {}, 1) end,
      "sample: z[0,1] is nan, wanted a finite logit or -inf")
    raises(function() kept({ 0, math.huge, 1 }, {}, 1) end,
      "sample: z[0,1] is inf, wanted a finite logit or -inf")
    raises(function() kept({ NAN, NAN, NAN }, {}, 1) end, "sample: z[0,0] is nan")
    raises(function() kept({ -math.huge, -math.huge, -math.huge }, {}, 1) end,
      "sample: z[0] has no finite logit")
  end)

  it("never draws a token of weight 0, nor one past the end (B84)", function()
    assert.same({ 1 }, kept({ -math.huge, 0, -math.huge }, {}))
    local V = 20000
    local flat = {}
    for i = 1, V do
      flat[i] = (i == 1 or i == V) and -math.huge or 0
    end
    local seen = kept(flat, {}, 400)
    assert.is_true(seen[1] >= 1 and seen[#seen] <= V - 2)
  end)

  it("draws by probability", function()
    local _, logp, id = kept({ math.log(0.2), math.log(0.5), math.log(0.3) }, { seed = 9 }, 20000)
    local count = { [0] = 0, 0, 0 }
    for _, value in ipairs(helper.values(id)) do
      count[value] = count[value] + 1
    end
    assert.is_true(math.abs(count[0] / 20000 - 0.2) < 0.015)
    assert.is_true(math.abs(count[1] / 20000 - 0.5) < 0.015)
    local first = helper.values(id)[1]
    close(logp[1], ({ [0] = math.log(0.2), math.log(0.5), math.log(0.3) })[first], 1e-6)
  end)

  it("gives a sequence its draws whatever else is in the batch", function()
    local z = helper.normal(1, { 5, 40 })
    local sequence = Tensor.from_table({ 11, 22, 33, 44, 2 ^ 40 }, "i64")
    local position = helper.ids(0, 5, 9, 2, 7)
    local id = fn.sample(z, sequence, position, { seed = 3 })
    for b = 1, 5 do
      local one = fn.sample(z:narrow(1, b, 1), sequence:narrow(1, b, 1), position:narrow(1, b, 1),
        { seed = 3 })
      assert.equal(id[b]:item(), one:item())
    end
  end)

  it("refuses options out of range", function()
    raises(function() kept({ 0, 1 }, { top_p = 1.5 }, 1) end, "sample: top_p is 1.5, wanted [0, 1]")
    raises(function() kept({ 0, 1 }, { min_p = -0.1 }, 1) end,
      "sample: min_p is -0.1, wanted [0, 1]")
    raises(function() kept({ 0, 1 }, { top_k = 1.5 }, 1) end,
      "sample: top_k is 1.5, wanted a whole number")
    raises(function()
      fn.sample(fn.ones(1, 2), Tensor.from_table({ 1 }, "i64"), helper.ids(-1), {})
    end, "sample: position[0] is -1, wanted at least 0")
  end)
end)

describe("rope", function()
  it("tells neighbours apart past position 256, in bf16 (B54)", function()
    local P = 260
    local cos, sin = Tensor.empty({ P, 1 }, "f32"), Tensor.empty({ P, 1 }, "f32")
    for p = 0, P - 1 do
      cos:data()[p], sin:data()[p] = math.cos(p), math.sin(p)
    end
    local x = Tensor.from_table({ { { 1, 0 } }, { { 1, 0 } } }, "bf16")
    local y = ops.rope(x, cos, sin, helper.ids(256, 257))
    close(y[1][1][1]:item(), -0.039791, 1e-3)
    close(y[2][1][1]:item(), 0.819306, 2e-3)
  end)

  it("turns only the front of a head that is partly rotary (B52)", function()
    local cos = Tensor.from_table({ { 1, 1 }, { math.cos(1), math.cos(0.01) } })
    local sin = Tensor.from_table({ { 0, 0 }, { math.sin(1), math.sin(0.01) } })
    local y = ops.rope(Tensor.from_table({ { { 1, 2, 3, 4, 5, 6, 7, 8 } } }), cos, sin,
      helper.ids(1))
    close(y, { { { -1.984111, 1.959901, 2.462378, 4.019800, 5, 6, 7, 8 } } }, 1e-6)
  end)

  it("refuses positions and pairs that are not there", function()
    local x, cos = fn.ones(1, 1, 4), fn.ones(3, 2)
    raises(function() ops.rope(x, cos, cos, helper.ids(3)) end,
      "rope: position[0] is 3, wanted [0, 3)")
    raises(function() ops.rope(x, cos, cos, helper.ids(-1)) end,
      "rope: position[0] is -1, wanted [0, 3)")
    raises(function() ops.rope(x, fn.ones(3, 3), fn.ones(3, 3), helper.ids(0)) end,
      "rope: cos has 3 pairs, wanted at most 2")
  end)
end)

describe("adamw", function()
  -- The step that one parameter takes.
  local function step(dtype, g, lr, eps)
    local acc = dtype == "f64" and "f64" or "f32"
    local p, m, v = fn.zeros(1, dtype), fn.zeros(1, acc), fn.zeros(1, acc)
    ops.adamw(fn.full(g, 1, acc), 1, lr, 0.9, 0.999, eps, 0, 1, p, m, v)
    return p:item()
  end

  it("adds epsilon after the correction of the second moment (B86)", function()
    close(step("f64", 0.01, 1e-3, 0.01) * 1e4, -5, 1e-9)
    close(step("f64", 0.01, 1e-3, 0) * 1e3, -1, 1e-9)
    close(step("f32", 0.01, 1e-3, 0.01) * 1e4, -5, 1e-5)
  end)
end)

describe("row offsets", function()
  -- Two rows 2^31 + 64 elements apart in memory that is only reserved: pages that nobody touches
  -- cost nothing.
  local APART = 2 ^ 31 + 64

  it("are 64 bits wide (B09)", function()
    local wide = Tensor.view_of(fn.zeros(50257), 0, { 64, 1024, 50257 }, { 0, 0, 1 })
    assert.equal(3293642752, wide:numel())
    local ok, room = pcall(Tensor.empty, { APART + 64 }, "bf16")
    if not ok then
      print("\nrow offsets: no 4 GiB of address space here, not checked")
      return
    end
    local function far(x)
      local y = Tensor.view_of(room, 0, x.shape, { APART, 1 })
      y:copy_(x)
      return y
    end
    local x, w = helper.normal(1, { 2, 32 }, "bf16"), helper.normal(2, { 32 }, "bf16")
    local y = far(x)
    same(x, y:clone())
    same((ops.rms_norm(x, w, 1e-6)), (ops.rms_norm(y, w, 1e-6)))
    same(ops.swiglu(x, x), ops.swiglu(y, y))
    local half = y:narrow(2, 9, 8)
    same(ops.swiglu(x:narrow(2, 9, 8):clone(), x:narrow(2, 9, 8):clone()), ops.swiglu(half, half))
    local target = helper.ids(3, 31)
    for _, of in ipairs({ fn.softmax, fn.entropy, function(z) return fn.logprob(z, target) end,
      function(z) return fn.cross_entropy(z, target, { reduction = "none" }) end }) do
      local near, apart = helper.to(x, "bf16"):requires_grad_(), y:detach():requires_grad_()
      local a, b = of(near), of(apart)
      same(a, b)
      fn.sum(a):backward()
      fn.sum(b):backward()
      same(near.grad, apart.grad)
    end
    y[2]:fill_(3)
    close(y[2], helper.values(fn.full(3, 32)), 0)
    same(x[1]:clone(), y[1]:clone())
    require("liger.memory").release(room.storage)
    require("liger.memory").trim()
  end)
end)

describe("a refused tensor", function()
  it("is one whose struct says what cannot be", function()
    local x = fn.ones(2)
    x.raw.dtype = 99
    raises(function() ops.raw.exp(x, fn.ones(2)) end, "exp: x has dtype 99, which is none")
    local y = fn.ones(2)
    y.raw.data = nil
    raises(function() ops.raw.exp(y, fn.ones(2)) end, "exp: x has no data")
    raises(function() ops.raw.exp(fn.ones(2), nil) end, "exp: y is missing")
    assert.is_true(lib.C.lg_exp(lib.ctx, nil, nil) ~= 0)
  end)
end)
