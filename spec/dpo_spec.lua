-- The DPO losses against their formulas in plain numbers, by central differences, and cut into
-- micro-batches.
local helper = require("spec.helper")
local dpo = require("liger.loss.dpo")
local fn = require("liger.fn")
local preference = require("liger.train.preference")
local Tensor = require("liger.tensor")

-- Token log-probabilities of the chosen and the rejected answer, and the reference's sums.
local PAIRS = {
  { { -1.1, -0.4, -2.0 }, { -0.7, -1.9 }, -3.1, -2.2 },
  { { -0.3 }, { -1.2, -0.8, -0.1, -0.6 }, -0.9, -2.4 },
  { { -2.2, -1.3 }, { -0.2, -0.5 }, -3.9, -1.5 },
  { { -0.9, -0.6, -1.7 }, { -1.0, -2.6, -0.4 }, -2.9, -5.1 },
}

local function new_batch(pairs_list, dtype)
  dtype = dtype or "f64"
  local logp, start, ref = {}, { 0 }, {}
  for side = 1, 2 do
    for _, pair in ipairs(pairs_list) do
      for _, x in ipairs(pair[side]) do
        logp[#logp + 1] = x
      end
      start[#start + 1] = #logp
      ref[#ref + 1] = pair[side + 2]
    end
  end
  return {
    completion_cu = Tensor.from_table(start, "i32"), ref_logps = Tensor.from_table(ref, dtype),
  }, Tensor.from_table(logp, dtype)
end

local function sum(list, weights)
  local total = 0
  for i, x in ipairs(list) do
    total = total + x * (weights and weights[i] or 1)
  end
  return total
end

local function softplus(x)
  return math.log(1 + math.exp(x))
end

local function sigmoid(x)
  return 1 / (1 + math.exp(-x))
end

local function value(o, pairs_list, batch_fields)
  local batch, logp = new_batch(pairs_list or PAIRS)
  for name, field in pairs(batch_fields or {}) do
    batch[name] = field
  end
  return dpo.loss(batch, logp, dpo.options(o)):item()
end

-- Mean over the pairs of f(c, r, m), with lengths.
local function mean(f, score)
  local total = 0
  score = score or function(s)
    return s
  end
  for _, pair in ipairs(PAIRS) do
    local c, r = sum(pair[1]) - pair[3], sum(pair[2]) - pair[4]
    local m = score(c) / #pair[1] - score(r) / #pair[2]
    total = total + f(score(c) - score(r), c, r, m) / #PAIRS
  end
  return total
end

local B = 0.7 -- beta

describe("DPO", function()
  it("has each loss's formula", function()
    local e = 0.1
    local formulas = {
      sigmoid = function(d)
        return softplus(-B * d)
      end,
      sigmoid_norm = function(_, _, _, m)
        return softplus(-B * m)
      end,
      hinge = function(d)
        return math.max(0, 1 - B * d)
      end,
      ipo = function(_, _, _, m)
        return (m - 1 / (2 * B)) ^ 2
      end,
      nca_pair = function(_, c, r)
        return softplus(-B * c) + softplus(B * c) / 2 + softplus(B * r) / 2
      end,
      bco_pair = function(_, c, r)
        return softplus(-B * c) + softplus(B * r)
      end,
      sppo_hard = function(_, c, r)
        return (c - 1 / (2 * B)) ^ 2 + (r + 1 / (2 * B)) ^ 2
      end,
      apo_zero = function(_, c, r)
        return 1 - sigmoid(B * c) + sigmoid(B * r)
      end,
      apo_down = function(d, c)
        return sigmoid(B * c) + 1 - sigmoid(B * d)
      end,
      discopop = function(d)
        local g = sigmoid(B * d / 0.05)
        return softplus(-B * d) * (1 - g) + math.exp(-B * d) * g
      end,
    }
    for name, formula in pairs(formulas) do
      helper.close(value({ loss_type = name, beta = B }), mean(formula), 1e-12, name)
    end
    local smoothed = {
      sigmoid = function(d)
        return (1 - e) * softplus(-B * d) + e * softplus(B * d)
      end,
      robust = function(d)
        return ((1 - e) * softplus(-B * d) - e * softplus(B * d)) / (1 - 2 * e)
      end,
      exo_pair = function(d)
        local q = sigmoid(B * d)
        return q * math.log(q / (1 - e)) + (1 - q) * math.log((1 - q) / e)
      end,
    }
    for name, formula in pairs(smoothed) do
      local got = value({ loss_type = name, beta = B, label_smoothing = e })
      helper.close(got, mean(formula), 1e-12, name)
    end
  end)

  it("sorts the batch in aot", function()
    local lists = { c = {}, r = {}, of_policy = {}, of_reference = {} }
    for i, pair in ipairs(PAIRS) do
      lists.c[i], lists.r[i] = sum(pair[1]) - pair[3], sum(pair[2]) - pair[4]
      lists.of_policy[i], lists.of_reference[i] = sum(pair[1]) - sum(pair[2]), pair[3] - pair[4]
    end
    for _, list in pairs(lists) do
      table.sort(list)
    end
    local paired, unpaired = 0, 0
    for i = 1, #PAIRS do
      paired = paired + softplus(-B * (lists.of_policy[i] - lists.of_reference[i])) / #PAIRS
      unpaired = unpaired + softplus(-B * (lists.c[i] - lists.r[i])) / #PAIRS
    end
    helper.close(value({ loss_type = "aot", beta = B }), paired, 1e-12)
    helper.close(value({ loss_type = "aot_unpaired", beta = B }), unpaired, 1e-12)
  end)

  it("shows a NaN in what it sorts", function()
    local broken = { { { 0 / 0 }, { -1 }, -1, -1 }, PAIRS[1], PAIRS[2] }
    local got = value({ loss_type = "aot" }, broken)
    assert.is_true(got ~= got)
  end)

  it("has each divergence's score", function()
    local function logistic(d)
      return softplus(-B * d)
    end
    for name, score in pairs({
      forward_kl = function(s)
        return 1 - math.exp(-s)
      end,
      js_divergence = function(s)
        return math.log(2) - softplus(-s)
      end,
      alpha_divergence = function(s)
        return (math.exp((0.3 - 1) * s) - 1) / (0.3 - 1)
      end,
    }) do
      local coef = name == "alpha_divergence" and 0.3 or nil
      local got = value({ beta = B, f_divergence_type = name, f_alpha_divergence_coef = coef })
      helper.close(got, mean(logistic, score), 1e-12, name)
    end
  end)

  it("stays finite, its gradient too, where a score's exponential would overflow", function()
    for _, o in ipairs({
      { f_divergence_type = "forward_kl" }, { f_divergence_type = "alpha_divergence" },
      { loss_type = "discopop" },
    }) do
      local batch, logp = new_batch({ { { -5000 }, { -1 }, -1, -5000 }, PAIRS[1] }, "f32")
      logp:requires_grad_()
      local loss = dpo.loss(batch, logp, dpo.options(o))
      loss:backward()
      for _, x in ipairs({ loss:item(), unpack(logp.grad:to_table()) }) do
        assert.is_true(x - x == 0)
      end
    end
  end)

  it("sums the losses of a list by their weights", function()
    local function one(name)
      return value({ loss_type = name, beta = B })
    end
    local chosen, tokens = 0, 0
    for _, pair in ipairs(PAIRS) do
      chosen, tokens = chosen + sum(pair[1]), tokens + #pair[1]
    end
    helper.close(one("sft"), -chosen / tokens, 1e-12)
    local wanted = 0.8 * one("sigmoid") + 0.2 * one("bco_pair") + 3 * one("sft")
    for _, o in ipairs({
      { loss_type = "sigmoid,bco_pair,sft", loss_weights = "0.8,0.2,3" },
      { loss_type = { "sigmoid", "bco_pair", "sft" }, loss_weights = { 0.8, 0.2, 3 } },
    }) do
      o.beta = B
      helper.close(value(o), wanted, 1e-12)
    end
    helper.close(value({ loss_type = "sigmoid,sft", loss_weights = "", beta = B }),
      one("sigmoid") + one("sft"), 1e-12)
  end)

  it("weighs tokens beyond the shorter answer by ld_alpha", function()
    local total = 0
    for _, pair in ipairs(PAIRS) do
      local n, weights = math.min(#pair[1], #pair[2]), {}
      for j = 1, 4 do
        weights[j] = j <= n and 1 or 0.3
      end
      local d = sum(pair[1], weights) - pair[3] - sum(pair[2], weights) + pair[4]
      total = total + softplus(-B * d) / #PAIRS
    end
    helper.close(value({ beta = B, ld_alpha = 0.3 }), total, 1e-12)
  end)

  it("weighs pairs by WPO's weight, a constant", function()
    local batch, logp = new_batch(PAIRS)
    local p2 = helper.normal(7, { logp:numel() }, "f64")
    local all, at, total = helper.values(p2), 0, 0
    local means = {}
    for side = 1, 2 do
      for i, pair in ipairs(PAIRS) do
        local n = #pair[side]
        local list = { unpack(all, at + 1, at + n) }
        means[i] = (means[i] or 0) + (sum(pair[side]) - sum(list)) / n
        at = at + n
      end
    end
    for i, pair in ipairs(PAIRS) do
      local d = sum(pair[1]) - pair[3] - sum(pair[2]) + pair[4]
      total = total + math.exp(means[i]) * softplus(-B * d) / #PAIRS
    end
    batch.log_p2 = p2
    local options = dpo.options({ beta = B, use_weighting = true })
    logp:requires_grad_()
    local loss = dpo.loss(batch, logp, options)
    helper.close(loss:item(), total, 1e-12)
    loss:backward()
    -- The first chosen token: its pair's weight times -b S(-b d) / pairs.
    local pair = PAIRS[1]
    local d = sum(pair[1]) - pair[3] - sum(pair[2]) + pair[4]
    helper.close(logp.grad:to_table()[1],
      -B * sigmoid(-B * d) * math.exp(means[1]) / #PAIRS, 1e-12)
  end)

  it("has the gradient of central differences in every loss and divergence", function()
    local cases = {}
    for name in ("sigmoid sigmoid_norm hinge ipo nca_pair robust bco_pair sppo_hard aot "
      .. "aot_unpaired apo_zero apo_down discopop sft"):gmatch("%S+") do
      cases[#cases + 1] = { loss_type = name }
    end
    for _, name in ipairs({ "sigmoid", "robust", "exo_pair", "aot", "aot_unpaired" }) do
      cases[#cases + 1] = { loss_type = name, label_smoothing = 0.2 }
    end
    for _, name in ipairs({ "forward_kl", "js_divergence", "alpha_divergence" }) do
      cases[#cases + 1] = { f_divergence_type = name }
      cases[#cases + 1] = { f_divergence_type = name, loss_type = "ipo" }
    end
    cases[#cases + 1] = { ld_alpha = 0.4, loss_type = "sigmoid,sft" }
    for _, o in ipairs(cases) do
      o.beta = 0.3
      local batch, logp = new_batch(PAIRS)
      helper.gradients(function(x)
        return (dpo.loss(batch, x, dpo.options(o)))
      end, { logp }, 1e-6)
    end
  end)

  it("has an exact zero in the gradient of pairs beyond hinge's margin", function()
    local batch, logp = new_batch({ { { -1, -1 }, { -9 }, -9, -1 }, PAIRS[1] })
    logp:requires_grad_()
    dpo.loss(batch, logp, dpo.options({ loss_type = "hinge", beta = 1 })):backward()
    local grad = logp.grad:to_table()
    assert.same({ 0, 0 }, { grad[1], grad[2] })
    assert.equal(0, grad[6])
    assert.is_true(grad[3] < 0)
  end)

  it("takes a reference of 0 without one, and asks for it otherwise", function()
    local batch, logp = new_batch(PAIRS)
    batch.ref_logps = nil
    helper.raises(function()
      dpo.loss(batch, logp, dpo.options())
    end, "dpo: the batch has no ref_logps, wanted them or reference_free")
    local total = 0
    for _, pair in ipairs(PAIRS) do
      total = total + softplus(-0.1 * (sum(pair[1]) - sum(pair[2]))) / #PAIRS
    end
    helper.close(dpo.loss(batch, logp, dpo.options({ reference_free = true })):item(), total)
    helper.raises(function()
      dpo.loss(batch, logp, dpo.options({ reference_free = true, use_weighting = true }))
    end, "dpo: use_weighting is true and the batch has no log_p2")
  end)

  it("B24: smooths labels in sigmoid, and refuses them where a loss does not read them", function()
    local pair = { { { -10 }, { -20 }, -12, -17 } }
    helper.close(value({ beta = 0.1 }, pair), 0.474077, 1e-6)
    helper.close(value({ beta = 0.1, label_smoothing = 0.1 }, pair), 0.524077, 1e-6)
    for name in ("sigmoid_norm hinge ipo nca_pair bco_pair sppo_hard apo_zero apo_down discopop "
      .. "sft"):gmatch("%S+") do
      helper.raises(function()
        dpo.options({ loss_type = name, label_smoothing = 0.1 })
      end, ("dpo: label_smoothing is 0.1, which counts only with loss_type sigmoid, exo_pair, "
        .. "robust, aot or aot_unpaired: loss_type is %s"):format(name))
    end
  end)

  it("refuses options that are unknown or out of range", function()
    for text, o in pairs({
      ["dpo: unknown option betta"] = { betta = 1 },
      ["dpo: beta is 0, wanted a number above 0"] = { beta = 0 },
      ["dpo: label_smoothing is 0.6, wanted a number from 0 to 0.5"] = { label_smoothing = 0.6 },
      ["dpo: loss_type is kto_pair, wanted sigmoid, sigmoid_norm,"] = { loss_type = "kto_pair" },
      ["dpo: loss_type is empty, wanted sigmoid"] = { loss_type = "" },
      ["dpo: loss_weights has 1 numbers, wanted one for each of 2 losses"] = {
        loss_type = "sigmoid,sft", loss_weights = "1",
      },
      ["dpo: loss_weights has x, wanted a number"] = { loss_weights = "x" },
      ["dpo: f_divergence_type is tv, wanted one of reverse_kl"] = { f_divergence_type = "tv" },
      ["dpo: f_alpha_divergence_coef is 1, wanted another number"] = {
        f_divergence_type = "alpha_divergence", f_alpha_divergence_coef = 1,
      },
      ["dpo: ld_alpha is 2, wanted a number from 0 to 1 or none"] = { ld_alpha = 2 },
      ["dpo: discopop_tau is 0, wanted a number above 0"] = { discopop_tau = 0 },
      ["dpo: use_weighting is 1, wanted true or false"] = { use_weighting = 1 },
      ["dpo: label_smoothing is 0, wanted a number above 0 with loss_type exo_pair"] = {
        loss_type = "exo_pair",
      },
      ["dpo: label_smoothing is 0.5, wanted a number below 0.5 with loss_type robust"] = {
        loss_type = "robust", label_smoothing = 0.5,
      },
      ["dpo: use_weighting is true, wanted false with loss_type sft, which has no pairs"] = {
        loss_type = "sigmoid,sft", use_weighting = true,
      },
    }) do
      helper.raises(function()
        dpo.options(o)
      end, text)
    end
  end)

  it("B20: has the same loss, gradient and metrics in micro-batches of pairs", function()
    local options = dpo.options({ loss_type = "sigmoid,sft", beta = B, ld_alpha = 0.5 })
    local batch, logp = new_batch(PAIRS)
    local total = preference.total({
      preference.sums(batch, dpo.loss(batch, logp:requires_grad_(), options)),
    })
    dpo.loss(batch, logp, options):backward()
    local tokens = batch.completion_cu:to_table()[#PAIRS + 1]
    local sums, grads = {}, {}
    for first = 1, 3, 2 do
      local micro, part = new_batch({ PAIRS[first], PAIRS[first + 1] })
      micro.total_rows, micro.total_tokens = #PAIRS, tokens
      local loss, values = dpo.loss(micro, part:requires_grad_(), options)
      loss:backward()
      preference.total({ preference.sums(micro, loss, values) }, sums)
      grads[#grads + 1] = part.grad:to_table()
    end
    local a, b = preference.metrics(total), preference.metrics(sums)
    for name, x in pairs(a) do
      helper.close(b[name], x, 1e-12, name)
    end
    -- The first pair's chosen and the last one's rejected answer.
    local whole = logp.grad:to_table()
    helper.close({ unpack(grads[1], 1, 3) }, { unpack(whole, 1, 3) }, 1e-12)
    helper.close(grads[2][#grads[2]], whole[#whole], 1e-12)
    helper.raises(function()
      local micro, part = new_batch({ PAIRS[1] })
      micro.total_rows = #PAIRS
      dpo.loss(micro, part, dpo.options({ loss_type = "aot" }))
    end, "dpo: aot sorts the whole batch, got 1 of 4 pairs; it cannot be split")
  end)

  it("counts an answer without tokens as length 1", function()
    local got = value({ loss_type = "ipo", beta = B }, { { {}, { -1, -2 }, -0.5, -2 } })
    helper.close(got, (0.5 - (-3 + 2) / 2 - 1 / (2 * B)) ^ 2, 1e-12)
    assert.equal(0, fn.segment_mean(fn.ones(1), helper.ids(0, 0, 1)):to_table()[1])
  end)
end)
