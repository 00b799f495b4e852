-- Distillation: the losses' values by hand, what the fused heads owe to the operators on logits,
-- the loss module, and teachers from a file.
local helper = require("spec.helper")
local autograd = require("liger.autograd")
local distill = require("liger.loss.distill")
local fn = require("liger.fn")
local loader = require("liger.model")
local ops = require("liger.ops")
local pack = require("liger.nn.pack")
local teacher_file = require("liger.data.teacher")
local Tensor = require("liger.tensor")

local close, ids, raises = helper.close, helper.ids, helper.raises

local function logs(rows)
  local y = Tensor.from_table(rows, "f64")
  return ops.log(y)
end

local INF = math.huge

-- Losses of one row of logits, each with its gradient with respect to the student's.
local LOSSES = {
  tvd = function(s, t, target, T) return (ops.tvd(s, t, target, T or 1, -100)) end,
  ce_tvd = function(s, t, target, T)
    local ce, tvd = ops.ce_tvd(s, t, target, T or 1, -100)
    return ce + tvd
  end,
  jsd = function(s, t, target, T) return (ops.jsd(s, t, target, 0.5, T or 1, -100)) end,
  forward_kl = function(s, t, target, T) return (ops.jsd(s, t, target, 0, T or 1, -100)) end,
  reverse_kl = function(s, t, target, T) return (ops.jsd(s, t, target, 1, T or 1, -100)) end,
  cosine = function(s, t, target, T) return (ops.cosine(s, t, target, T or 1, -100)) end,
}

local function with_gradient(loss, student, teacher, target)
  local s = helper.to(student, student.dtype):requires_grad_()
  local y = loss(s, teacher, target)
  fn.sum(y):backward()
  return y, s.grad
end

describe("a divergence", function()
  it("B22: leaves ignored rows out of loss, divisor and gradient", function()
    local teacher = logs({ { 0.5, 0.5 }, { 0.2, 0.8 } })
    for _, other in ipairs({ 0.3, 0.9, 1e-9 }) do
      local student = logs({ { 0.9, 0.1 }, { other, 1 - other } })
      local y, grad = with_gradient(LOSSES.jsd, student, teacher, ids(0, -100))
      close(y, { 0.101749, 0 }, 1e-5)
      close(grad[2], { 0, 0 }, 0)
      assert.is_true(math.abs(grad[1]:to_table()[1]) > 0.01)
      local eye = Tensor.from_table({ { 1, 0 }, { 0, 1 } }, "f64")
      local x = helper.to(student, "f64"):requires_grad_()
      local loss = fn.linear_distill(x, eye, teacher, eye, ids(0, -100), { divergence = "jsd" })
      loss:backward()
      close(loss, 0.101749, 1e-5)
      close(x.grad, grad, 1e-12)
      local none = fn.linear_distill(x, eye, teacher, eye, ids(-100, -100), { divergence = "jsd" })
      none:backward()
      assert.equal(0, none:item())
      close(x.grad, grad, 1e-12)
    end
  end)

  it("has its value and its gradient by hand", function()
    local student, teacher = logs({ { 0.7, 0.2, 0.1 } }), logs({ { 0.5, 0.2, 0.3 } })
    local p, q = { 0.7, 0.2, 0.1 }, { 0.5, 0.2, 0.3 }
    local forward, reverse = 0, 0
    for v = 1, 3 do
      forward = forward + q[v] * math.log(q[v] / p[v])
      reverse = reverse + p[v] * math.log(p[v] / q[v])
    end
    local y, grad = with_gradient(LOSSES.tvd, student, teacher, ids(0))
    close(y, { 0.2 }, 1e-12)
    -- sigma = 0.7 - 0.1; the second column's p and q are equal to rounding only.
    close(grad[1][1], 0.7 * (1 - 0.6) / 2, 0.1)
    y, grad = with_gradient(LOSSES.forward_kl, student, teacher, ids(0))
    close(y, { forward }, 1e-12)
    close(grad, { { 0.2, 0, -0.2 } }, 1e-12)
    y, grad = with_gradient(LOSSES.reverse_kl, student, teacher, ids(0))
    close(y, { reverse }, 1e-12)
    close(grad[1][1], 0.7 * (math.log(0.7 / 0.5) - reverse), 1e-12)
    y = with_gradient(LOSSES.cosine, Tensor.from_table({ { 3, 4 } }, "f64"),
      Tensor.from_table({ { 4, 3 } }, "f64"), ids(0))
    close(y, { 1 - 24 / 25 }, 1e-12)
  end)

  it("is 0 with a gradient of exactly 0 where student and teacher agree", function()
    local same = helper.normal(1, { 3, 50 }, "f32")
    for _, name in ipairs({ "tvd", "jsd", "forward_kl", "reverse_kl" }) do
      local y, grad = with_gradient(LOSSES[name], same, same, ids(0, 1, 2))
      close(y, { 0, 0, 0 }, 0)
      close(grad, fn.zeros(3, 50), 0)
    end
  end)

  it("takes columns of probability 0, a whole first tile of them, and finite numbers", function()
    local V = 3000
    local function row(seed)
      local x = helper.normal(seed, { 1, V }, "f64")
      for v = 0, V - 1 do
        x:data()[v] = (v < 2050 or v % 3 == 0) and -INF or x:data()[v]
      end
      return x
    end
    local function compact(x)
      local list = {}
      for _, value in ipairs(x:to_table()[1]) do
        list[#list + 1] = value > -INF and value or nil
      end
      return Tensor.from_table({ list }, "f64")
    end
    local student, teacher = row(1), row(2)
    for name, loss in pairs(LOSSES) do
      local y, grad = with_gradient(loss, student, teacher, ids(2051))
      local first = 0
      for v = 2050, 2051 do
        first = first + (student:data()[v] > -INF and 1 or 0)
      end
      local wanted, wanted_grad = with_gradient(loss, compact(student), compact(teacher),
        ids(first - 1))
      close(y, wanted, 1e-12, name)
      local kept = {}
      for v = 0, V - 1 do
        if student:data()[v] > -INF then
          kept[#kept + 1] = grad[1]:to_table()[v + 1]
        else
          assert.equal(0, grad:data()[v])
        end
      end
      close({ kept }, wanted_grad, 1e-12, name)
    end
  end)

  it("is infinite only where the other has no probability at all", function()
    local student = Tensor.from_table({ { 0, -INF, 0 } }, "f64")
    local teacher = Tensor.from_table({ { 0, 0, -INF } }, "f64")
    close(LOSSES.forward_kl(student, teacher, ids(0)), { INF })
    close(LOSSES.reverse_kl(student, teacher, ids(0)), { INF })
    close(LOSSES.jsd(student, teacher, ids(0)), { math.log(2) / 2 }, 1e-12)
    close(LOSSES.tvd(student, teacher, ids(0)), { 0.5 }, 1e-12)
    local _, grad = with_gradient(LOSSES.forward_kl, student, teacher, ids(0))
    close(grad, { { 0, -0.5, 0.5 } }, 1e-12)
  end)

  it("holds norms of the cosine at 1e-8 or more", function()
    local zero, teacher = fn.zeros(1, 2, "f64"), Tensor.from_table({ { 3, 4 } }, "f64")
    local y, grad = with_gradient(LOSSES.cosine, zero, teacher, ids(0))
    close(y, { 1 }, 0)
    close(grad, { { -0.6e8, -0.8e8 } }, 1e-12)
  end)

  it("keeps 16 bytes a row in f32", function()
    local s = helper.normal(1, { 5, 9 })
    local _, _, saved = ops.ce_tvd(s, s, ids(0, 1, 2, 3, 4), 1, -100)
    assert.equal(5 * 16, saved:numel() * 4)
  end)

  it("refuses what is out of range", function()
    local s, t = fn.ones(2, 3), fn.ones(2, 3)
    for _, T in ipairs({ 0, -1, 0 / 0 }) do
      for name, loss in pairs(LOSSES) do
        local op = name:find("_kl") and "jsd" or name
        raises(function() loss(s, t, ids(0, 1), T) end, op .. ": temperature is ", "wanted above 0")
      end
    end
    raises(function() ops.jsd(s, t, nil, 1.5, 1, -100) end, "jsd: beta is 1.5, wanted 0 to 1")
    raises(function() ops.ce_tvd(s, fn.ones(2, 2), ids(0, 2), 1, -100) end,
      "ce_tvd: target[1] is 2, wanted [0, 2) or -100")
    raises(function() ops.tvd(s, fn.ones(2, 0), nil, 1, -100) end,
      "tvd: student and teacher share no column, wanted one")
  end)
end)

-- ---- heads ----

-- A student and a teacher of unequal widths, in f64.
local function problem(V, U)
  local N, C, K = 6, 5, 7
  return {
    x = helper.normal(1, { N, C }, "f64"), w = helper.normal(2, { V, C }, "f64"),
    b = helper.normal(3, { V }, "f64"), teacher_x = helper.normal(4, { N, K }, "f64"),
    teacher_w = helper.normal(5, { U, K }, "f64"), teacher_b = helper.normal(6, { U }, "f64"),
    target = ids(0, 3, -100, 2, 1, 4),
  }
end

local VARIANTS = {
  { divergence = "tvd", weight_hard = 0.3, weight_soft = 0.5 },
  { divergence = "jsd", beta = 0.1, temperature = 2, weight_soft = 0.5 },
  { divergence = "jsd", beta = 0, weight_hard = 0.1, softcap = 2, teacher_softcap = 3 },
  { divergence = "jsd", beta = 1, temperature = 0.7, softcap = 2, weight_soft = 0.2 },
  { divergence = "cosine", weight_hard = 0.2, weight_soft = 1, temperature = 2 },
}

describe("linear_distill", function()
  it("has the gradient of its own loss, with padded vocabularies on either side", function()
    for _, options in ipairs(VARIANTS) do
      for _, sizes in ipairs({ { 9, 9 }, { 9, 11 }, { 11, 9 } }) do
        local p = problem(unpack(sizes))
        local o = { bias = p.b, teacher_bias = p.teacher_b }
        for key, value in pairs(options) do
          o[key] = value
        end
        local function loss()
          return (fn.linear_distill(p.x, p.w, p.teacher_x, p.teacher_w, p.target, o))
        end
        local leaves = { p.x, p.w, p.b }
        for _, leaf in ipairs(leaves) do
          leaf:requires_grad_()
        end
        loss():backward()
        for i, leaf in ipairs(leaves) do
          helper.check_gradient(function() return autograd.no_grad(loss):item() end, leaf,
            leaf.grad, 1e-6,
            ("%s %d"):format(options.divergence, i))
        end
      end
    end
  end)

  it("gives the losses of the logits' operators", function()
    local p = problem(9, 9)
    local z = ops.linear_logits(p.x, p.w, p.b, 1, 0)
    local t = ops.linear_logits(p.teacher_x, p.teacher_w, p.teacher_b, 1, 0)
    local o = { bias = p.b, teacher_bias = p.teacher_b, temperature = 1.5, weight_soft = 1 }
    local ce, tvd = ops.ce_tvd(z, t, p.target, 1.5, -100)
    local _, rows = fn.linear_distill(p.x, p.w, p.teacher_x, p.teacher_w, p.target, o)
    close(rows.hard, ce, 1e-12)
    close(rows.soft, tvd, 1e-12)
    local _, entropy = fn.linear_logprob(p.x, p.w, p.target, { bias = p.b, temperature = 1.5 })
    close(rows.entropy, entropy, 1e-12)
  end)

  it("weighs each row by its own weights", function()
    local p = problem(9, 9)
    local weights = { hard = helper.normal(8, { 6 }, "f64"), soft = helper.normal(9, { 6 }, "f64") }
    local loss, rows = fn.linear_distill(p.x, p.w, p.teacher_x, p.teacher_w, p.target, {
      weight_hard = weights.hard, weight_soft = weights.soft,
    })
    close(loss, fn.sum(rows.hard * weights.hard + rows.soft * weights.soft), 1e-12)
  end)

  it("sends rows that are ignored through no product, and computes nothing else", function()
    local p, lib = problem(9, 9), require("liger.ffi")
    local stats = lib.C.lg_context_stats(lib.ctx)
    local before = stats.gemm_rows
    fn.linear_distill(p.x, p.w, p.teacher_x, p.teacher_w, p.target)
    assert.equal(10, stats.gemm_rows - before)
    p.x:requires_grad_()
    before = stats.gemm_rows
    fn.linear_distill(p.x, p.w, p.teacher_x, p.teacher_w, p.target)
    assert.equal(15, stats.gemm_rows - before)
  end)

  it("refuses what it cannot do", function()
    local p = problem(9, 8)
    local function run(options, target)
      return function()
        fn.linear_distill(p.x, p.w, p.teacher_x, p.teacher_w, target or p.target, options)
      end
    end
    raises(run({ divergence = "kl" }),
      "linear_distill: divergence is kl, wanted tvd, jsd or cosine")
    raises(run({ scale = 1 }), "linear_distill: unknown option scale")
    raises(run({ beta = 2 }), "linear_distill: beta is 2, wanted 0 to 1")
    raises(run({ temperature = 0 }), "linear_distill: temperature is 0, wanted above 0")
    raises(run({}, ids(0, 1, 2, 3, 4, 8)), "linear_distill: target[5] is 8, wanted [0, 8) or -100")
    local raw = { p.x, p.w, nil, p.teacher_x, p.teacher_w, nil, p.target, nil, nil, 3, 0.5, 1, 0, 0,
      -100, -1, fn.zeros(6, "f64"), fn.zeros(6, "f64") }
    raises(function() ops.raw.linear_distill(unpack(raw, 1, 18)) end,
      "linear_distill: divergence is 3, wanted 0 to 2")
    p.x:requires_grad_()
    local loss = fn.linear_distill(p.x, p.w, p.teacher_x, p.teacher_w, p.target)
    raises(function() (loss * 2):backward() end, "linear_distill: gradient from above is 2, ",
      "wanted 1; pass the factor as weight_hard and weight_soft")
    raises(function()
      local computed = p.w:requires_grad_() * 1
      fn.linear_distill(p.x, computed, p.teacher_x, p.teacher_w, p.target)
    end, "linear_distill: weight or bias is computed, wanted a leaf; use linear_logprob")
    raises(function()
      fn.linear_distill_topk(p.x, p.w, ids(), ids(), p.target, { teacher_softcap = 1 })
    end, "linear_distill_topk: unknown option teacher_softcap")
  end)
end)

-- The divergence of two lists of probabilities.
local function of_classes(name, p, q)
  local s, t = logs({ p }), logs({ q })
  return LOSSES[name](s, t, ids(0)):item()
end

describe("linear_distill_topk", function()
  it("is the divergence with one more class for all other tokens", function()
    local V, student = 6, { 0.3, 0.25, 0.2, 0.15, 0.07, 0.03 }
    local x = Tensor.from_table({ { 1 } }, "f64")
    local buckets_p, buckets_q = { 0.25, 0.15, 0.6 }, { 0.5, 0.2, 0.3 }
    local id = Tensor.from_table({ { 1, -1, 3 } }, "i32")
    local logp = Tensor.from_table({ { math.log(0.5), -INF, math.log(0.2) } }, "f64")
    for name, o in pairs({
      tvd = { divergence = "tvd" }, jsd = { divergence = "jsd" },
      forward_kl = { divergence = "jsd", beta = 0 }, reverse_kl = { divergence = "jsd", beta = 1 },
    }) do
      o.weight_soft = 1
      local w = logs({ student }):reshape(V, 1)
      w = helper.to(w, "f64"):requires_grad_()
      local function loss()
        return (fn.linear_distill_topk(x, w, id, logp, ids(0), o))
      end
      close(loss(), of_classes(name, buckets_p, buckets_q), 1e-9, name)
      w.grad = nil
      loss():backward()
      -- The rest's columns share their class's gradient by their probabilities.
      local function bucket_loss()
        local z, all, p = w:data(), 0, {}
        for v = 0, V - 1 do
          p[v] = math.exp(z[v])
          all = all + p[v]
        end
        return of_classes(name, {
          p[1] / all, p[3] / all, (p[0] + p[2] + p[4] + p[5]) / all,
        }, buckets_q)
      end
      helper.check_gradient(bucket_loss, w, w.grad, 1e-6, name)
    end
  end)

  it("is that of the whole head where all ids are known", function()
    local p = problem(9, 9)
    local t = ops.linear_logits(p.teacher_x, p.teacher_w, nil, 1, 0)
    local id, logp = Tensor.empty({ 6, 9 }, "i32"), Tensor.empty({ 6, 9 }, "f64")
    for n = 0, 5 do
      local total = 0
      for v = 0, 8 do
        total = total + math.exp(t:data()[n * 9 + v])
      end
      for v = 0, 8 do
        id:data()[n * 9 + v] = v
        logp:data()[n * 9 + v] = t:data()[n * 9 + v] - math.log(total)
      end
    end
    local o = { divergence = "jsd", temperature = 2 }
    local _, rows = fn.linear_distill(p.x, p.w, p.teacher_x, p.teacher_w, p.target, o)
    local _, known = fn.linear_distill_topk(p.x, p.w, id, logp, p.target, o)
    close(known.soft, rows.soft, 1e-12)
  end)
end)

-- ---- the module ----

local CONFIG = {
  model_type = "qwen3", vocab_size = 13, hidden_size = 8, num_hidden_layers = 1,
  num_attention_heads = 2, head_dim = 4, intermediate_size = 12, tie_word_embeddings = true,
}

local function model_of(seed, hidden)
  local c = {}
  for key, value in pairs(CONFIG) do
    c[key] = value
  end
  c.hidden_size = hidden or c.hidden_size
  return loader.from_config(c, { dtype = "f64" }):init(seed, 0.4)
end

describe("distillation", function()
  local samples = {
    { ids = { 1 }, completion = { 2, 3, 4 } }, { ids = { 5, 6 }, completion = { 7 } },
  }

  it("B20: divides by the targets of all micro-batches", function()
    for _, loss_type in ipairs({ "ce_tvd", "jsd", "cosine" }) do
      local options, teacher = distill.options({ loss_type = loss_type, temperature = 1.5 }),
        model_of(3, 16)
      local function pass(parts)
        local student, total, sums = model_of(2), 0, {}
        for _, part in ipairs(parts) do
          local batch = pack.completions(part)
          local loss, rows = distill.loss(student, teacher, batch, options, 1 / 4)
          loss:backward()
          total, sums[#sums + 1] = total + loss:item(), distill.sums(batch, rows)
        end
        return student, total, distill.metrics(distill.total(sums), options)
      end
      local whole, loss, metrics = pass({ samples })
      local parts, same_loss, same_metrics = pass({ { samples[1] }, { samples[2] } })
      close(same_loss, loss, 1e-12)
      close(metrics.loss, loss, 1e-12)
      for name, value in pairs(metrics) do
        close(same_metrics[name], value, 1e-12, name)
      end
      for i, p in ipairs(whole.list) do
        close(parts.list[i].tensor.grad, p.tensor.grad, 1e-12, p.name)
      end
      for _, p in ipairs(teacher.list) do
        assert.is_nil(p.tensor.grad)
      end
    end
  end)

  it("has a loss of each type", function()
    local batch, student, teacher = pack.completions(samples), model_of(2), model_of(3, 16)
    local z, t = student:logits(batch), teacher:logits(batch)
    for loss_type, of_logits in pairs(LOSSES) do
      local options = distill.options({ loss_type = loss_type, temperature = 2, weight_soft = 3 })
      local loss = distill.loss(student, teacher, batch, options, 0.25)
      local wanted
      if loss_type == "ce_tvd" then
        local ce, tvd = ops.ce_tvd(z, t, batch.target, 2, -100)
        wanted = ce + tvd * 3
      else
        wanted = of_logits(z, t, batch.target, 2) * 3
      end
      close(loss, fn.sum(wanted):item() / 4, 1e-12, loss_type)
    end
  end)

  it("logs zeros where there is no target", function()
    local zero = fn.zeros(1)
    local sums = distill.sums({ target = ids(-100) }, { hard = zero, soft = zero, entropy = zero })
    assert.same(
      { loss = 0, hard_loss = 0, soft_loss = 0, entropy = 0 },
      distill.metrics(distill.total({ sums }), distill.options())
    )
  end)

  it("refuses what it does not know", function()
    for _, case in ipairs({
      { { loss = 1 }, "distill: unknown option loss" },
      { { loss_type = "kl" }, "distill: loss_type is kl, wanted one of ce_tvd, tvd, jsd, " },
      { { beta = 1.5 }, "distill: beta is 1.5, wanted a number from 0 to 1" },
      { { temperature = 0 }, "distill: temperature is 0, wanted a number above 0" },
      { { temperature = INF }, "distill: temperature is inf, wanted a number above 0" },
      { { weight_hard = -1 }, "distill: weight_hard is -1, wanted a number from 0" },
      { { weight_soft = "x" }, "distill: weight_soft is x, wanted a number from 0" },
      { { loss_type = "tvd", weight_soft = 0 }, "distill: weight_hard and weight_soft are 0" },
    }) do
      raises(function() distill.options(case[1]) end, case[2])
    end
  end)
end)

describe("a teacher's file", function()
  local function load(text, cut)
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write(text, "\n")
    file:close()
    local samples = { { ids = { 1 }, completion = { 1, 2 }, row = { _line = 1 }, cut = cut } }
    local ok, message = pcall(teacher_file.load, path, samples, 9)
    os.remove(path)
    return samples, ok and "" or message, path
  end

  it("stands beside the completion's rows", function()
    local samples = load('{"ids": [[3, 4], [5]], "logprobs": [[-0.5, -1.5], [-0.25]]}')
    local batch = teacher_file.attach(pack.completions(samples), samples)
    assert.same({ { 3, 4 }, { 5, -1 } }, batch.teacher_id:to_table())
    assert.same({ { -0.5, -1.5 }, { -0.25, -INF } }, batch.teacher_logp:to_table())
  end)

  it("is cut with a sample that was cut", function()
    local longer = '{"ids": [[3], [5], [6]], "logprobs": [[-0.5], [-0.25], [-1]]}'
    local _, message = load(longer)
    assert.matches("column `ids` has 3 lists, wanted a list for each of 2", message)
    local cut = load(longer, true)
    assert.same({ { 3 }, { 5 } },
      teacher_file.attach(pack.completions(cut), cut).teacher_id:to_table())
  end)

  it("is refused where it does not fit the data", function()
    local TOKEN = ":1: columns `ids` and `logprobs`: token "
    for text, wanted in pairs({
      ["\n{}"] = ":1: the line is missing, wanted one for each of the data's",
      ['{"ids": [[1]], "logprobs": [[-1], [-1]]}'] =
        ":1: column `ids` has 1 list, wanted a list for each of 2 completion tokens",
      ['{"ids": [[1], [2]]}'] = ":1: column `logprobs` is missing, wanted a list for each of 2",
      ['{"ids": [[1], 2], "logprobs": [[-1], [-1]]}'] = TOKEN .. "2 has no list",
      ['{"ids": [[1], []], "logprobs": [[-1], []]}'] = TOKEN .. "2 has 0 ids and 0 logprobs",
      ['{"ids": [[1, 2], [2]], "logprobs": [[-1], [-1]]}'] =
        TOKEN .. "1 has 2 ids and 1 logprobs",
      ['{"ids": [[9], [2]], "logprobs": [[-1], [-1]]}'] =
        TOKEN .. "1 has id 9, wanted a whole number from 0 to 8",
      ['{"ids": [[3, 3], [2]], "logprobs": [[-1, -1], [-1]]}'] = TOKEN .. "1 has id 3 twice",
      ['{"ids": [[3], [2]], "logprobs": [[0.1], [-1]]}'] =
        TOKEN .. "1 has logprob 0.1, wanted a number up to 0",
      ['{"ids": [[3, 4], [2]], "logprobs": [[-0.1, -0.1], [-1]]}'] =
        TOKEN .. "1 has probabilities that add up to 1.8097, wanted at most 1",
    }) do
      local _, message, path = load(text)
      assert.is_truthy(message:find(path .. wanted, 1, true), message)
    end
  end)
end)
