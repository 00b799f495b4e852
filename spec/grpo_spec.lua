local helper = require("spec.helper")
local fn = require("liger.fn")
local grpo = require("liger.loss.grpo")
local Tensor = require("liger.tensor")

local NAN = 0 / 0
local TYPES = { "grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo" }

local function options(o)
  o = o or {}
  if o.loss_type == "dr_grpo" then
    o.max_completion_length = o.max_completion_length or 8
  end
  return grpo.options(o)
end

-- A batch of sequences { advantage, logp = {...}, old = {...}?, ref = {...}?, mask = {...}? }.
local function new_batch(sequences, dtype)
  local columns = { logp = {}, old = {}, ref = {}, mask = {}, advantage = {}, sequence = {} }
  local start, lengths = { 0 }, {}
  for s, q in ipairs(sequences) do
    lengths[s] = 0
    for t = 1, #q.logp do
      local k = #columns.logp + 1
      columns.logp[k] = q.logp[t]
      columns.old[k] = q.old and q.old[t]
      columns.ref[k] = q.ref and q.ref[t]
      columns.mask[k] = q.mask and q.mask[t] or 1
      columns.advantage[k] = q.advantage
      columns.sequence[k] = s - 1
      lengths[s] = lengths[s] + columns.mask[k]
    end
    start[s + 1] = #columns.logp
  end
  local function tensor(name, as)
    local list = columns[name]
    if #list > 0 or #columns.logp == 0 then
      return Tensor.from_table(list, as or dtype or "f64")
    end
  end
  return {
    mask = tensor("mask"), advantage = tensor("advantage"),
    old_logp = tensor("old"), ref_logp = tensor("ref"),
    sequence = tensor("sequence", "i32"), completion_cu = Tensor.from_table(start, "i32"),
  }, tensor("logp"):requires_grad_(), lengths
end

-- Gives each token its sequence's weight.
local function weigh(batch, weights, dtype)
  local column = {}
  for k, s in ipairs(batch.sequence:to_table()) do
    column[k] = weights[s + 1]
  end
  batch.weight = Tensor.from_table(column, dtype or "f64")
end

-- The loss of the whole batch as the recipe forms it, the gradient of every token, metrics, the
-- token losses.
local function run(sequences, o, dtype)
  o = options(o)
  local batch, logp, lengths = new_batch(sequences, dtype)
  weigh(batch, grpo.weights(lengths, o), dtype)
  local entropy = fn.full_like(logp, 0.5)
  local token_loss = grpo.token_loss(batch, logp:detach(), o, entropy)
  local loss, part = grpo.loss(batch, logp, entropy, o)
  loss:backward()
  local metrics = grpo.metrics({ part }, o)
  helper.close(metrics.loss, loss:item(), 1e-5)
  return loss:item(), logp.grad:to_table(), metrics, token_loss:to_table()
end

local function finite(list)
  for i, x in ipairs(list) do
    assert.is_true(x - x == 0, ("value %d is %g"):format(i, x))
  end
end

-- A sequence whose token losses are given: on policy, loss = -advantage.
local function losing(loss, tokens, mask)
  local logp, masks = {}, {}
  for t = 1, tokens do
    logp[t], masks[t] = -1, mask or 1
  end
  return { advantage = -loss, logp = logp, mask = masks }
end

describe("the ratio and its clipping", function()
  it("B43: without old log-probabilities the value is -A and the gradient is -A", function()
    local loss, grad = run({ { advantage = 2, logp = { -1 } } }, {})
    assert.equal(-2, loss)
    assert.same({ -2 }, grad)
    loss, grad = run({ { advantage = 2, logp = { -1 }, old = { -1.5 } } }, {})
    helper.close(loss, -2.4, 1e-12)
    assert.same({ 0 }, grad)
  end)

  it("B41: clips by the sign of the advantage and counts where it binds", function()
    local sequences = {}
    for i, case in ipairs({ { 0.7, 1 }, { 0.7, -1 }, { 1.3, 1 }, { 1.3, -1 } }) do
      sequences[i] = { advantage = case[2], logp = { -1 + math.log(case[1]) }, old = { -1 } }
    end
    local _, grad, metrics, token_loss = run(sequences, { epsilon = 0.2, epsilon_high = 0.28 })
    helper.close(token_loss, { -0.7, 0.8, -1.28, 1.3 }, 1e-12)
    helper.close(grad, { -0.7 / 4, 0, 0, 1.3 / 4 }, 1e-12)
    assert.equal(0, grad[2])
    assert.equal(0, grad[3])
    assert.equal(0.25, metrics["clip_ratio/low_mean"])
    assert.equal(0.25, metrics["clip_ratio/high_mean"])
    assert.equal(0.5, metrics["clip_ratio/region_mean"])
    assert.equal(0, metrics["clip_ratio/low_min"])
    assert.equal(1, metrics["clip_ratio/high_max"])
  end)

  it("is capped by delta where the advantage is negative", function()
    local far = { advantage = -1, logp = { -1 + math.log(4) }, old = { -1 } }
    local loss, grad = run({ far }, {})
    helper.close({ loss, grad[1] }, { 4, 4 }, 1e-12)
    loss, grad = run({ far }, { delta = 2 })
    helper.close({ loss, grad[1] }, { 2, 0 }, 1e-12)
  end)

  it("B40: of a sequence is the exponential of the mean log-ratio of its counted tokens", function()
    local sequence = {
      advantage = 1, logp = { -1, -1, -1 }, old = { -1.3, -1.1, -9 }, mask = { 1, 1, 0 },
    }
    local o = { importance_sampling_level = "sequence", epsilon_high = 5 }
    local _, _, _, token_loss = run({ sequence }, o)
    helper.close({ token_loss[1], token_loss[2] }, { -1.221403, -1.221403 }, 1e-6)
    -- Nothing counts: ratio 1, loss 0.
    sequence.mask = { 0, 0, 0 }
    local loss, grad
    loss, grad, _, token_loss = run({ sequence }, o)
    assert.equal(0, loss)
    assert.same({ 0, 0, 0 }, grad)
    assert.same({ -1, -1, -1 }, token_loss)
  end)

  it("B40: keeps sequences apart", function()
    local a = { advantage = 1, logp = { -1, -2 }, old = { -1.1, -2.3 } }
    local b = { advantage = -0.5, logp = { -3, -1, -1 }, old = { -3.05, -1.2, -0.9 } }
    local o = { importance_sampling_level = "sequence", loss_type = "grpo" }
    local alone_a, grad_a = run({ a }, o)
    local alone_b, grad_b = run({ b }, o)
    local both, grad = run({ a, losing(1, 0), b }, o)
    helper.close(both, (alone_a + alone_b) / 3, 1e-12)
    helper.close(grad, {
      grad_a[1] / 3, grad_a[2] / 3, grad_b[1] / 3, grad_b[2] / 3, grad_b[3] / 3,
    }, 1e-12)
  end)
end)

describe("the KL term", function()
  local function k3(d, dtype, corrected)
    local loss, grad = run({ { advantage = 0, logp = { -1 }, ref = { -1 + d } } }, {
      beta = 1, use_bias_correction_kl = corrected or false,
    }, dtype)
    return loss, grad[1]
  end

  it("B30: is exp(d) - d - 1, capped where exp would overflow", function()
    for _, dtype in ipairs({ "f64", "f32" }) do
      local tolerance = dtype == "f64" and 1e-6 or 1e-5
      helper.close({ (k3(2, dtype)) }, { 4.389056 }, tolerance)
      helper.close({ (k3(-2, dtype)) }, { 1.135335 }, tolerance)
      helper.close(select(2, k3(2, dtype)), 1 - math.exp(2), tolerance)
      for _, d in ipairs({ 21, 100, 1e4 }) do
        local value, slope = k3(d, dtype)
        helper.close(value / (math.exp(20) - 21), 1, 1e-4)
        assert.equal(0, slope)
        value, slope = k3(d, dtype, true)
        finite({ value, slope })
      end
      finite({ k3(-1e4, dtype) })
    end
  end)

  it("B30: is that of fp32 under a bf16 head", function()
    for _, case in ipairs({ { 2, 4.389056 }, { -2, 1.135335 }, { 100, math.exp(20) - 21 } }) do
      local d = case[1]
      local x = fn.ones(1, 1, "bf16")
      local w = Tensor.from_table({ { 0 }, { -100 } }, "bf16"):requires_grad_()
      local logp = fn.linear_logprob(x, w, helper.ids(1))
      local batch = new_batch({ { advantage = 0, logp = { 0 }, ref = { -100 + d } } }, "f32")
      local o = options({ beta = 1, use_bias_correction_kl = false })
      weigh(batch, { 1 }, "f32")
      local loss = grpo.loss(batch, logp, fn.full_like(logp, 0), o)
      loss:backward()
      helper.close(loss:item() / case[2], 1, 1e-5)
      local slope = d < 20 and 1 - math.exp(d) or 0
      helper.close(w.grad, { { -slope }, { slope } }, 1e-5)
    end
  end)

  it("is multiplied by the ratio with its correction, which adds to the gradient", function()
    local sequence = { advantage = 0, logp = { -1 }, old = { -1.1 }, ref = { -1.5 } }
    local d, r = -0.5, math.exp(0.1)
    local k = math.exp(d) - d - 1
    local loss, grad, metrics = run({ sequence }, { beta = 0.1, use_bias_correction_kl = true })
    helper.close(loss, 0.1 * k * r, 1e-12)
    helper.close(grad[1], 0.1 * (r * (1 - math.exp(d)) + k * r), 1e-12)
    helper.close(metrics.kl, k * r, 1e-12)
    loss, grad, metrics = run({ sequence }, { beta = 0.1, use_bias_correction_kl = false })
    helper.close(loss, 0.1 * k, 1e-12)
    helper.close(grad[1], 0.1 * (1 - math.exp(d)), 1e-12)
    helper.close(metrics.kl, k, 1e-12)
    assert.is_nil((select(3, run({ sequence }, {}))).kl)
  end)

  it("is multiplied by the ratio that delta has not capped", function()
    local sequence = { advantage = -1, logp = { -1 }, old = { -2 }, ref = { -1.5 } }
    local r, k = math.exp(1), math.exp(-0.5) - 0.5
    local loss, grad = run({ sequence }, { beta = 0.1, delta = 1.5 })
    helper.close(loss, 1.5 + 0.1 * k * r, 1e-12)
    helper.close(grad[1], 0.1 * (r * (1 - math.exp(-0.5)) + k * r), 1e-12)
  end)

  it("B32: is all that moves a group of equal rewards", function()
    local function group(beta)
      local sequences = {}
      for i = 1, 4 do
        sequences[i] = { advantage = 0, logp = { -1, -2 }, ref = { -1.5, -2 } }
      end
      local o = { beta = beta }
      if beta > 0 then
        o.use_bias_correction_kl = false
      end
      return run(sequences, o)
    end
    local loss, grad = group(0)
    assert.equal(0, loss)
    for _, g in ipairs(grad) do
      assert.equal(0, g)
    end
    -- Such groups count in the divisor.
    loss, grad = group(0.04)
    local k, slope = math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)
    helper.close(loss, 0.04 * k / 2, 1e-12)
    helper.close(grad[1], 0.04 * slope / 8, 1e-12)
    assert.equal(0, grad[2])
  end)
end)

describe("the policy terms beside the clipped one", function()
  local function token(advantage, ratio)
    return { advantage = advantage, logp = { -1 + math.log(ratio) }, old = { -1 } }
  end

  it("of cispo weigh the log-probability by the ratio up to epsilon_high itself", function()
    for _, case in ipairs({ { 2, 1.5, 1.5 }, { 2, 4, 3 }, { -1, 0.1, 0.1 }, { -1, 4, 3 } }) do
      local A, ratio, weight = unpack(case)
      local o = { loss_type = "cispo", epsilon_high = 3 }
      local loss, grad, metrics = run({ token(A, ratio) }, o)
      helper.close({ loss, grad[1] }, { -weight * A * (-1 + math.log(ratio)), -weight * A }, 1e-12)
      assert.equal(A > 0 and ratio > 3 and 1 or 0, metrics.cispo_clip_ratio)
      assert.is_nil(metrics["clip_ratio/low_mean"])
    end
  end)

  it("of sapo are a sigmoid of the ratio, softer for negative advantages", function()
    for _, case in ipairs({ { 2, 1.5, 1 }, { -1, 1.5, 1.05 }, { 3, 0.2, 1 } }) do
      local A, ratio, tau = unpack(case)
      local s = 1 / (1 + math.exp(-tau * (ratio - 1)))
      local loss, grad, metrics = run({ token(A, ratio) }, { loss_type = "sapo" })
      helper.close({ loss, grad[1] }, { -A * s * 4 / tau, -A * 4 * s * (1 - s) * ratio }, 1e-12)
      assert.is_nil(metrics["clip_ratio/low_mean"])
    end
    local _, grad = run({ token(1, 1) }, { loss_type = "sapo", sapo_temperature_pos = 7 })
    helper.close(grad, { -1 }, 1e-12) -- at a ratio of 1 any temperature gives the policy gradient
  end)

  it("of vespo weigh the log-probability by the ratio of the whole sequence", function()
    for _, A in ipairs({ 2, -1 }) do
      local k, lambda = A > 0 and 2 or 3, A > 0 and 3 or 2
      local w = math.exp(0.3)
      local phi = math.exp(lambda + k * math.log(w) - lambda * w)
      local sequence = { advantage = A, logp = { -1, -2 }, old = { -1.1, -2.2 } }
      local loss, grad, metrics = run({ sequence }, { loss_type = "vespo" })
      helper.close({ loss, grad[1], grad[2] }, { 1.5 * phi * A, -phi * A / 2, -phi * A / 2 }, 1e-12)
      helper.close(metrics["vespo/phi_seq_mean"], phi, 1e-12)
    end
    -- Far away it is 0, never NaN.
    local far = { advantage = 1, logp = { -1, -1 }, old = { -900, -900 } }
    local loss, grad = run({ far }, { loss_type = "vespo" }, "f32")
    assert.equal(0, loss)
    assert.equal(0, grad[1])
  end)
end)

describe("the sampler's ratio", function()
  -- Ratios of the old policy to the sampler of one sample, and the metrics.
  local function ratios(mode, differences, o)
    local sample = { old_logp = {}, sampler_logp = {} }
    for j, d in ipairs(differences) do
      sample.old_logp[j], sample.sampler_logp[j] = -2 + d, -2
    end
    o = o or {}
    o.sampler_mode = mode
    local metrics = grpo.sampler_ratios({ sample }, options(o))
    return sample.sampler_ratio, metrics
  end
  local LN = math.log

  it("is truncated or masked, of a token or of a sequence, its bounds included", function()
    local d = { LN(2), LN(4), LN(0.25) }
    for _, case in ipairs({
      { "token_truncate", 2, 3, 0.5 }, { "token_mask", 2, 0, 0 },
      { "sequence_truncate", 2, 2, 2 }, { "sequence_mask", 2, 2, 2 },
    }) do
      helper.close(ratios(case[1], d, { sampler_clip_min = 0.5 }), { unpack(case, 2) }, 1e-12)
    end
    helper.close(ratios("token_mask", { 0, LN(2) }, { sampler_clip_min = 1 }), { 1, 2 }, 1e-12)
    helper.close(ratios("sequence_mask", { LN(2), LN(2) }), { 0, 0 }, 0)
    helper.close(ratios("sequence_truncate", { LN(2), LN(2) }), { 3, 3 }, 0)
    -- There is no lower bound unless it is given.
    helper.close(ratios("token_truncate", { LN(0.01) }), { 0.01 }, 1e-12)
  end)

  it("is 1 where it is NaN", function()
    local list, metrics = ratios("token_truncate", { 0 / 0, LN(2) })
    helper.close(list, { 1, 2 }, 1e-12)
    helper.close(metrics["sampling/sampling_logp_difference/max"], LN(2), 1e-12)
    helper.close(metrics["sampling/importance_sampling_ratio/mean"], 1.5, 1e-12)
    helper.close(ratios("sequence_truncate", { 0 / 0, LN(2) }), { 2, 2 }, 1e-12)
  end)

  it("leaves samples that are masked out of its metrics", function()
    local samples = {
      { old_logp = { -1 }, sampler_logp = { -9 }, masked = true },
      { old_logp = { -1 }, sampler_logp = { -1.5 } }, { old_logp = {}, sampler_logp = {} },
    }
    local metrics = grpo.sampler_ratios(samples, options({ sampler_mode = "sequence_mask" }))
    helper.close(metrics["sampling/sampling_logp_difference/max"], 0.5, 1e-12)
    helper.close(metrics["sampling/importance_sampling_ratio/min"], math.exp(0.5), 1e-12)
    for name, value in pairs(grpo.sampler_ratios({}, options({ sampler_mode = "token_mask" }))) do
      assert.equal(0, value, name)
    end
  end)

  it("is a factor of the policy term, not of the KL, and is folded into vespo's weight", function()
    local function with(o, ratio)
      o = options(o)
      local batch, logp, lengths = new_batch({
        { advantage = 2, logp = { -1, -2 }, old = { -1, -2 }, ref = { -1.5, -2 } },
      })
      weigh(batch, grpo.weights(lengths, o))
      batch.sampler_ratio = fn.full(ratio, 2, "f64")
      return grpo.loss(batch, logp, fn.full_like(logp, 0), o):item()
    end
    helper.close(with({}, 0.5), -1, 1e-12)
    local k3 = math.exp(-0.5) - 0.5
    helper.close(with({ beta = 0.1 }, 0.5), -1 + 0.1 * k3 / 2, 1e-12)
    local function phi(w)
      return math.exp(3 + 2 * math.log(w) - 3 * w)
    end
    helper.close(with({ loss_type = "vespo" }, 0.5), 3 * phi(0.25), 1e-12)
    helper.close(with({ loss_type = "vespo", sampler_mode = "token_mask" }, 0.5), 3 * phi(0.25),
      1e-12)
    helper.close(with({ loss_type = "vespo", sampler_mode = "sequence_mask" }, 0.5), 3 * phi(0.5),
      1e-12)
  end)
end)

describe("masks of the policy term", function()
  it("leave out sequences of negative advantage that drifted from what was sampled", function()
    local function sequence(advantage, drift)
      return { advantage = advantage, logp = { -1, -1 }, old = { -1 + drift, -1 + drift } }
    end
    local o = { off_policy_mask_threshold = 0.1, loss_type = "cispo", epsilon_high = 9 }
    local _, grad = run({ sequence(-1, 0.05), sequence(-1, 0.2), sequence(1, 0.2) }, o)
    assert.is_true(grad[1] > 0 and grad[5] < 0)
    assert.same({ 0, 0 }, { grad[3], grad[4] })
    -- The sampler's log-probabilities count where there are any.
    local batch, logp = new_batch({ sequence(-1, 0) })
    batch.sampler_logp = fn.full(-0.8, 2, "f64")
    assert.same({ 0, 0 }, grpo.token_loss(batch, logp, options(o)):to_table())
  end)

  it("keep the tokens of the highest entropy, and the KL of all", function()
    local sequences = {
      { advantage = 1, logp = { -1, -1, -1 }, ref = { -1.5, -1.5, -1.5 } },
      { advantage = 1, logp = { -1, -1 }, ref = { -1.5, -1.5 } },
    }
    local entropies = { 0.1, 0.5, 0.3, 0.4, 0.2 }
    local function active(quantile)
      local batch, logp = new_batch(sequences)
      local loss, parts = grpo.token_loss(batch, logp, options({ top_entropy_quantile = quantile }),
        Tensor.from_table(entropies, "f64"))
      loss = loss:to_table()
      for k, on in ipairs(parts.active:to_table()) do
        assert.equal(-on, loss[k])
      end
      return parts.active:to_table(), parts.num_active
    end
    -- Quantiles 0.8 and 0.6 of five lie at 0.42 and 0.34; 0.5 is the middle one, which is kept.
    local function is(quantile, wanted, count)
      local got, number = active(quantile)
      assert.same(wanted, got)
      assert.equal(count, number)
    end
    is(0.2, { 0, 1, 0, 0, 0 }, 1)
    is(0.4, { 0, 1, 0, 1, 0 }, 2)
    is(0.5, { 0, 1, 1, 1, 0 }, 3)
    is(0, { 0, 1, 0, 0, 0 }, 1)
    entropies[2] = NAN -- shows, instead of being masked
    is(0.2, { 1, 0, 1, 1, 1 }, 5)
  end)
end)

describe("the entropy bonus", function()
  it("is the mean entropy of the active tokens, with its gradient", function()
    local function bonus(quantile)
      local o = options({ entropy_coef = 0.5, top_entropy_quantile = quantile })
      local batch, logp, lengths = new_batch({ { advantage = 1, logp = { -1, -1, -1, -1 } } })
      weigh(batch, grpo.weights(lengths, o))
      local entropy = Tensor.from_table({ 0.1, 0.4, 0.2, 0.3 }, "f64"):requires_grad_()
      local loss, part = grpo.loss(batch, logp, entropy, o)
      loss:backward()
      return loss:item(), entropy.grad:to_table(), grpo.metrics({ part }, o)
    end
    local loss, grad, metrics = bonus(1)
    helper.close(loss, -1 - 0.5 * 0.25, 1e-12)
    helper.close(grad, { -0.125, -0.125, -0.125, -0.125 }, 1e-12)
    helper.close({ metrics.loss, metrics.policy_loss, metrics.entropy_coef }, { loss, -1, 0.5 },
      1e-12)
    loss, grad, metrics = bonus(0.5)
    helper.close(loss, -0.5 - 0.5 * 0.35, 1e-12)
    helper.close(grad, { 0, -0.25, 0, -0.25 }, 1e-12)
    helper.close({ metrics.loss, metrics.policy_loss, metrics.entropy }, { loss, -0.5, 0.25 },
      1e-12)
  end)
end)

describe("a loss of one's own", function()
  it("takes the place of the policy term", function()
    local sequences = { { advantage = 2, logp = { -1, -3 }, old = { -1, -3 }, ref = { -1.5, -3 } } }
    local seen
    local o = {
      beta = 0.1, use_bias_correction_kl = false,
      loss = function(batch, logp, given)
        seen = given
        return logp * batch.advantage
      end,
    }
    local loss, grad, metrics = run(sequences, o)
    local k, slope = math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)
    helper.close(loss, (-2 - 6 + 0.1 * k) / 2, 1e-12)
    helper.close(grad, { (2 + 0.1 * slope) / 2, 1 }, 1e-12)
    assert.equal(0.2, seen.epsilon)
    assert.equal(0, metrics["clip_ratio/low_mean"])
    assert.is_true(grpo.keeps_all(seen))
  end)

  it("is to blame where it is not finite and the log-probabilities are", function()
    local function gives(factor)
      return function()
        run({ { advantage = 1, logp = { -1 } } }, {
          loss = function(_, logp) return logp * factor end,
        })
      end
    end
    helper.raises(gives(NAN), "loss: the function gave nan for completion 1, wanted finite numbers")
    helper.raises(gives(math.huge), "loss: the function gave inf for completion 1")
  end)
end)

describe("the weights of tokens", function()
  it("B36: are those of each loss type", function()
    local sequences = { losing(4, 1), losing(1, 3) }
    for kind, wanted in pairs({
      grpo = 2.5, bnpo = 1.75, dapo = 1.75, dr_grpo = 0.4375, luspo = 3.5, sapo = 2 / 1.05 * 2.5,
    }) do
      helper.close((run(sequences, { loss_type = kind })), wanted, 1e-12, kind)
    end
    helper.close((run(sequences, { loss_type = "dapo", num_items_in_batch = 14 })), 0.5, 1e-12)
  end)

  it("B20: are by the counts of the whole batch, so a split changes nothing", function()
    local weights = grpo.weights({ 3, 1 }, options({ loss_type = "dapo" }))
    helper.close(3 * 1 * weights[1] + 1 * 5 * weights[2], 2, 1e-12)
    for _, kind in ipairs(TYPES) do
      local sequences = {
        { advantage = 1, logp = { -1, -2, -3 }, old = { -1.1, -2, -2.9 } },
        { advantage = -1, logp = { -1 }, old = { -1.1 } },
      }
      local o = options({ loss_type = kind })
      local whole, gradient = run(sequences, { loss_type = kind })
      local by_sequence, total = grpo.weights({ 3, 1 }, o), 0
      for s, q in ipairs(sequences) do
        local batch, logp = new_batch({ q })
        local loss = fn.sum(grpo.token_loss(batch, logp, o) * by_sequence[s])
        loss:backward()
        total = total + loss:item()
        for t, g in ipairs(logp.grad:to_table()) do
          helper.close(g, gradient[(s - 1) * 3 + t], 1e-12)
        end
      end
      helper.close(total, whole, 1e-12, kind)
    end
  end)

  it("B35: of nothing that counts give 0, with finite metrics", function()
    for _, kind in ipairs(TYPES) do
      for _, level in ipairs({ "token", "sequence" }) do
        local o = { loss_type = kind, importance_sampling_level = level, beta = 0.1 }
        local function masked()
          return {
            advantage = 1, logp = { -1, -2, -3 }, old = { -1, -2, -3 }, ref = { -2, -1, -3 },
            mask = { 0, 0, 0 },
          }
        end
        local loss, grad, metrics = run({ masked(), masked() }, o)
        assert.equal(0, loss)
        assert.same({ 0, 0, 0, 0, 0, 0 }, grad)
        for name, value in pairs(metrics) do
          assert.equal(0, value, name)
        end
        assert.same({ loss = 0 }, grpo.metrics({}, options(o)))
      end
    end
  end)

  it("B35: of an empty completion beside a normal one", function()
    for kind, wanted in pairs({
      grpo = 0.5, bnpo = 1, dapo = 1, dr_grpo = 2 / 16, luspo = 1, sapo = 1 / 1.05,
    }) do
      local loss, grad = run({ losing(1, 0), losing(1, 2) }, { loss_type = kind })
      helper.close(loss, wanted, 1e-12, kind)
      finite(grad)
    end
    assert.equal(0, (run({ losing(1, 0) }, {})))
  end)

  it("B38: leave masked tokens out of the divisor", function()
    for _, kind in ipairs({ "dapo", "bnpo" }) do
      helper.close((run({ losing(1, 3), losing(1, 5, 0) }, { loss_type = kind })), 1, 1e-12)
      assert.equal(0, (run({ losing(1, 5, 0) }, { loss_type = kind })))
    end
  end)
end)

describe("masks", function()
  it("B39: keep a NaN in a masked place out of loss and gradient, in every mode", function()
    for _, kind in ipairs(TYPES) do
      for _, level in ipairs({ "token", "sequence" }) do
        for _, beta in ipairs({ 0, 0.1 }) do
          local function sequence(nan)
            return {
              advantage = 1, logp = { 0, 0 }, old = { 0, nan }, ref = { 0, nan }, mask = { 1, 0 },
            }
          end
          local o = { loss_type = kind, beta = beta, importance_sampling_level = level }
          if kind == "vespo" and beta == 0 then
            o.importance_sampling_level = nil -- which would have no effect
          end
          local loss, grad, metrics = run({ sequence(NAN) }, o)
          local same_loss, same_grad = run({ sequence(0) }, o)
          assert.equal(same_loss, loss)
          assert.same(same_grad, grad)
          assert.equal(0, grad[2])
          local wanted = { dr_grpo = -1 / 8, sapo = -2, cispo = 0, vespo = 0 } -- of logp 0
          assert.equal(wanted[kind] or -1, loss, kind)
          for name, value in pairs(metrics) do
            assert.equal(value, value, name)
          end
        end
      end
    end
  end)

  it("B39: show a NaN in a kept place", function()
    local loss = run({ { advantage = 1, logp = { 0, 0 }, old = { 0, NAN } } }, {})
    assert.is_true(loss ~= loss)
  end)

  it("B39: give the mean of what they keep", function()
    local x, mask = Tensor.from_table({ 1, NAN, 3 }, "f64"), Tensor.from_table({ 1, 0, 1 }, "f64")
    assert.equal(4, fn.masked_sum(x, mask):item())
    assert.equal(2, fn.masked_mean(x, mask):item())
  end)
end)

describe("the temperature", function()
  it("B44: scales the log-probabilities of policy, old policy and reference alike", function()
    local hidden, target = Tensor.from_table({ { 1 } }, "f64"), helper.ids(0)
    local function logp(logits, temperature)
      local weight = Tensor.from_table({ { logits[1] }, { logits[2] } }, "f64")
      return fn.linear_logprob(hidden, weight, target, { temperature = temperature }):item()
    end
    helper.close(logp({ 1, 0 }, 2), -0.474077, 1e-6)
    helper.close(logp({ 1, 0 }, 1), -0.313262, 1e-6)
    helper.close(logp({ 0, 5 }, 0.01), -500, 1e-9)
    local scaled = logp({ 1, 0 }, 2)
    local token = { advantage = 3, logp = { scaled }, old = { scaled }, ref = { scaled } }
    local loss, grad, metrics = run({ token }, {
      beta = 0.5,
    })
    assert.equal(-3, loss)
    assert.same({ -3 }, grad)
    assert.equal(0, metrics.kl)
  end)
end)

describe("the metrics", function()
  it("are the same for one batch and for its parts", function()
    for _, level in ipairs({ "token", "sequence" }) do
      local o = options({ importance_sampling_level = level, beta = 0.1, epsilon = 0.1 })
      local sequences = {
        { advantage = 1, logp = { -1, -2, -1 }, old = { -1.3, -1.5, -1 }, ref = { -1, -1, -1 } },
        { advantage = -1, logp = { -2, -2 }, old = { -1.5, -1.9 }, ref = { -2, -1 } },
        { advantage = 2, logp = { -1 }, old = { -1.4 }, ref = { -1.2 } },
      }
      local function part(list)
        local batch, logp = new_batch(list)
        weigh(batch, { 1, 1, 1 })
        return select(2, grpo.loss(batch, logp, (logp * -0.5):detach(), o))
      end
      local whole = grpo.metrics({ part(sequences) }, o)
      local parts = {}
      for i, q in ipairs(sequences) do
        parts[i] = part({ q })
      end
      for name, value in pairs(grpo.metrics(parts, o)) do
        helper.close(value, whole[name], 1e-12, name)
      end
      helper.close(whole.entropy, 0.5 * 9 / 6, 1e-12)
      assert.is_true(whole["clip_ratio/region_mean"] > 0)
    end
  end)
end)

describe("the options", function()
  it("have TRL's defaults", function()
    local o = grpo.options()
    assert.equal("dapo", o.loss_type)
    assert.equal(0.2, o.epsilon)
    assert.equal(0.2, o.epsilon_high)
    assert.equal(0, o.beta)
    assert.is_true(o.use_bias_correction_kl)
    assert.equal("token", o.importance_sampling_level)
    assert.equal(0.3, grpo.options({ epsilon = 0.3 }).epsilon_high)
  end)

  it("are refused when unknown or out of range", function()
    local function refused(o, ...)
      helper.raises(function()
        grpo.options(o)
      end, ...)
    end
    refused({ losses = "dapo" }, "grpo: unknown option losses")
    refused({
      loss_type = "ppo",
    }, "grpo: loss_type is ppo, wanted one of grpo, bnpo, dapo, dr_grpo, luspo, cispo, sapo, vespo")
    refused({
      importance_sampling_level = "word",
    }, "grpo: importance_sampling_level is word, wanted one of token, sequence")
    refused({ loss_type = "dr_grpo" }, "grpo: loss_type dr_grpo needs max_completion_length")
    refused({
      loss_type = "dr_grpo", max_completion_length = 0,
    }, "grpo: max_completion_length is 0")
    refused({ epsilon = -0.1 }, "grpo: epsilon is -0.1, wanted a number from 0")
    refused({ epsilon = "0.2" }, "grpo: epsilon is 0.2, wanted a number from 0")
    refused({ epsilon_high = -1 }, "grpo: epsilon_high is -1")
    refused({ epsilon_high = "x" }, "grpo: epsilon_high is x")
    refused({ beta = -1 }, "grpo: beta is -1")
    refused({ beta = NAN }, "grpo: beta is")
    refused({ delta = 0 }, "grpo: delta is 0, wanted a number above 0")
    refused({ delta = "2" }, "grpo: delta is 2, wanted a number above 0")
    refused({ num_items_in_batch = -1 }, "grpo: num_items_in_batch is -1")
    refused({
      use_bias_correction_kl = 1,
    }, "grpo: use_bias_correction_kl is 1, wanted true or false")
    refused({ delta = true }, "grpo: delta is true, wanted a number above 0 or none")
    refused({ entropy_coef = -1 }, "grpo: entropy_coef is -1, wanted a number from 0")
    refused({
      top_entropy_quantile = 1.1,
    }, "grpo: top_entropy_quantile is 1.1, wanted a number from 0 to 1")
    refused({
      off_policy_mask_threshold = "x",
    }, "grpo: off_policy_mask_threshold is x, wanted a number or none")
    refused({
      sampler_mode = "token",
    }, "grpo: sampler_mode is token, wanted one of token_truncate, token_mask, sequence_truncate")
    refused({ sampler_clip_max = 0 }, "grpo: sampler_clip_max is 0, wanted a number above 0")
    refused({
      sampler_clip_min = -1,
    }, "grpo: sampler_clip_min is -1, wanted a number from 0 or none")
    refused({ sapo_temperature_neg = 0 }, "grpo: sapo_temperature_neg is 0")
    refused({ vespo_k_pos = -1 }, "grpo: vespo_k_pos is -1")
    refused({ loss = 3 }, "grpo: loss is 3, wanted a text")
  end)

  it("need reference log-probabilities for a KL term", function()
    helper.raises(function()
      run({ { advantage = 1, logp = { -1 } } }, { beta = 0.1 })
    end, "grpo: beta is 0.1 and the batch has no ref_logp")
  end)
end)
