-- GRPO (Shao et al. 2024, equation 3) and its kin, with TRL's names, defaults and formulas. For a
-- completion token of advantage A, with sg the gradient's stop and
--   r = exp(logp - old_logp), of the token, or of the mean over its sequence (GSPO),
-- the policy term is, by loss type,
--   grpo, bnpo, dapo, dr_grpo, luspo
--           -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
--   cispo   -sg(min(r, epsilon_high)) A logp           (MiniMax-M1; the bound as ScaleRL has it)
--   sapo    -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A
--   vespo   -sg(phi) A logp, phi = e^lambda w^k e^(-lambda w), w the ratio of the whole sequence,
--           k and lambda by the sign of A
-- or a function of one's own. It is 0 where a mask says so, takes the sampler's ratio as a factor,
-- and is followed by
--   + beta KL, KL = exp(d) - d - 1, d = ref_logp - logp (k3, Schulman 2020), times r with
--     use_bias_correction_kl
-- A token's weight is
--   grpo, sapo           1 / (samples * tokens of its sample)
--   bnpo                 1 / tokens of the batch
--   dapo, cispo, vespo   1 / tokens of the batch over all devices (num_items_in_batch)
--   dr_grpo              1 / (samples * max_completion_length)
--   luspo                1 / samples
-- and entropy_coef times the mean entropy of the active tokens is taken off the sum.
local autograd = require("liger.autograd")
local files = require("liger.file")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local option = require("liger.options")
local usage = require("liger.train.options")
local metrics = require("liger.loss.grpo_metrics")
local Tensor = require("liger.tensor")
local whole_batch = require("liger.loss.grpo_batch")

local M = {
  weights = whole_batch.weights, sampler_ratios = whole_batch.sampler_ratios,
  whole = whole_batch.whole, metrics = metrics.metrics,
}

-- Above this exponent k3 is capped and its gradient is 0: exp overflows fp32 at 88. VESPO's bound
-- of log-ratios is the same.
local MAX_LOG_RATIO = 20
local MIN_LOG_WEIGHT = math.log(1e-8) -- of a sequence, in VESPO
local MIN_LAMBDA = 1e-4

M.defaults = {
  loss = "", -- a Lua file or a function(batch, logp, options) in place of the policy term
  loss_type = "dapo",
  epsilon = 0.2,
  epsilon_high = false, -- default: epsilon
  delta = false, -- cap of the ratio before the minimum
  beta = 0,
  use_bias_correction_kl = true,
  importance_sampling_level = "token",
  max_completion_length = false, -- of dr_grpo
  num_items_in_batch = false, -- of dapo; default: the tokens that count
  off_policy_mask_threshold = false, -- drift in nats a token above which A < 0 is left out
  top_entropy_quantile = 1, -- share of tokens, those of the highest entropy, with a policy term
  entropy_coef = 0,
  sampler_mode = false,
  sampler_clip_min = false,
  sampler_clip_max = 3,
  sapo_temperature_pos = 1,
  sapo_temperature_neg = 1.05,
  vespo_k_pos = 2,
  vespo_lambda_pos = 3,
  vespo_k_neg = 3,
  vespo_lambda_neg = 2,
}

local from_0 = { min = 0 }
local CLIPS = { grpo = true, bnpo = true, dapo = true, dr_grpo = true, luspo = true }

-- A policy term of one's own may read what it likes.
local own = { "loss" }
local of_clipped = { { "loss_type", "grpo", "bnpo", "dapo", "dr_grpo", "luspo" }, own }
local of_sapo = { above = 0, with = { { "loss_type", "sapo" }, own } }
local of_vespo = { min = 0, with = { { "loss_type", "vespo" }, own } }
local any_of_clips = { "loss_type", "grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo" }

--- What the options may be, in a recipe too, and when they count.
M.ranges = {
  loss_type = { "grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo" },
  importance_sampling_level = {
    "token", "sequence",
    with = {
      { "loss_type", "grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo" },
      { "beta", above = 0 }, own,
    },
  },
  sampler_mode = { "token_truncate", "token_mask", "sequence_truncate", "sequence_mask" },
  epsilon = { min = 0, with = of_clipped }, delta = { above = 0, with = of_clipped },
  epsilon_high = { min = 0, with = { any_of_clips, own } },
  beta = from_0, use_bias_correction_kl = { with = { "beta", above = 0 } }, entropy_coef = from_0,
  off_policy_mask_threshold = {}, top_entropy_quantile = { min = 0, max = 1 },
  sampler_clip_min = { min = 0, with = { "sampler_mode" } },
  sampler_clip_max = { above = 0, with = { "sampler_mode" } },
  sapo_temperature_pos = of_sapo, sapo_temperature_neg = of_sapo,
  vespo_k_pos = of_vespo, vespo_lambda_pos = of_vespo, vespo_k_neg = of_vespo,
  vespo_lambda_neg = of_vespo,
  max_completion_length = { min = 1, whole = true },
}

-- And of what no recipe has.
local ALL_RANGES = setmetatable({
  num_items_in_batch = { above = 0, with = { "loss_type", "dapo", "cispo", "vespo" } },
}, { __index = M.ranges })

-- The function of a user's file; it must give a loss for each log-probability.
local function own_loss(path)
  local loss, message = files.load_function(path, "function(batch, logp, options)")
  if not loss then
    usage.usage_error("loss: " .. message)
  end
  return function(batch, logp, options)
    local y = loss(batch, logp, options)
    local got = Tensor.is(y) and y.dtype .. " " .. Tensor.shape_text(y.shape) or type(y)
    local wanted = logp.dtype .. " " .. Tensor.shape_text(logp.shape)
    if got ~= wanted then
      lib.raise(("loss: %s returned %s, wanted %s as logp"):format(path, got, wanted))
    end
    return y
  end
end

--- The options with their defaults; raises on an unknown one and on a value out of range.
---@param options? table
---@return table
function M.options(options)
  local given = {}
  for key, value in pairs(options or {}) do
    given[key] = value
  end
  local loss = given.loss
  given.loss = type(loss) == "function" and "the function" or loss
  local o = option.over("grpo", M.defaults, ALL_RANGES, given)
  if o.loss_type == "dr_grpo" and not o.max_completion_length then
    lib.raise("grpo: loss_type dr_grpo needs max_completion_length")
  end
  o.epsilon_high = o.epsilon_high or o.epsilon
  o.clips = CLIPS[o.loss_type]
  if type(loss) == "function" then
    o.own = loss
  elseif o.loss ~= "" then
    o.own = own_loss(o.loss)
  end
  return o
end

--- True where samples of advantage 0 have a gradient too, or are needed for a mask.
---@param o table  of options()
---@return boolean
function M.keeps_all(o)
  return o.beta > 0 or o.entropy_coef > 0 or o.top_entropy_quantile < 1 or o.own ~= nil
end

-- ---- the loss of a token ----

-- x where the mask counts a token, else 0: a NaN that stands in a masked place stays out of the
-- gradient too.
local function counted(batch, x)
  return fn.where(batch.mask, x, 0)
end

-- Mean of x, 0 where masked, over each sequence's counted tokens, given back to every token of it.
local function sequence_mean(batch, x)
  local cu = batch.completion_cu
  local counts = ops.segment_sum(batch.mask, cu):clamp(1, math.huge)
  return ops.gather(ops.div(ops.segment_sum(x, cu), counts), batch.sequence)
end

-- a where the advantage is not negative (or, with `above`, is positive), else b.
local function by_sign(batch, a, b, above)
  local mask = above and fn.gt(batch.advantage, 0) or fn.ge(batch.advantage, 0)
  return mask * (a - b) + b
end

-- VESPO's phi, of the ratio of the whole sequence, the sampler's included.
local function gamma_weight(batch, log_ratio, o)
  local cu, ratio = batch.completion_cu, batch.sampler_ratio
  local log_weight = ops.segment_sum(log_ratio:clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), cu)
  if ratio then
    local logs = counted(batch, ratio:log():clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO))
    if o.sampler_mode and o.sampler_mode:find("^sequence") then
      logs = ops.div(logs, ops.gather(
        ops.segment_sum(batch.mask, cu):clamp(1, math.huge), batch.sequence
      ))
    end
    log_weight = log_weight + ops.segment_sum(logs, cu)
  end
  local of_token = ops.gather(log_weight:clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO), batch.sequence)
  local k = by_sign(batch, o.vespo_k_pos, o.vespo_k_neg)
  local lambda = by_sign(batch, math.max(o.vespo_lambda_pos, MIN_LAMBDA),
    math.max(o.vespo_lambda_neg, MIN_LAMBDA))
  return (lambda + k * of_token - lambda * of_token:exp()):exp()
end

-- The policy term of the loss type. `ratio` is capped by delta.
local function policy_term(batch, logp, ratio, uncapped, log_ratio, o)
  local A, kind = batch.advantage, o.loss_type
  if o.own then
    return o.own(batch, logp, o)
  elseif o.clips then
    local clipped = uncapped:clamp(1 - o.epsilon, 1 + o.epsilon_high)
    return -fn.minimum(ratio * A, clipped * A)
  elseif kind == "cispo" then
    return -(ratio:detach():clamp(-math.huge, o.epsilon_high) * A * logp)
  elseif kind == "sapo" then
    local tau = by_sign(batch, o.sapo_temperature_pos, o.sapo_temperature_neg, true)
    return -(((ratio - 1) * tau):sigmoid() * A * (4 / tau))
  end
  local phi = autograd.no_grad(gamma_weight, batch, log_ratio, o)
  return -(phi * A * logp), phi
end

-- 1 for the tokens whose advantage is not negative or whose sequence has not drifted from what it
-- was sampled from (DeepSeek-V3.2).
local function near_policy(batch, logp, o)
  local sampled = batch.sampler_logp or batch.old_logp or logp
  local drift = sequence_mean(batch, counted(batch, sampled - logp))
  return fn.maximum(fn.ge(batch.advantage, 0), fn.le(drift, o.off_policy_mask_threshold))
end

-- 1 for the counted tokens that reach the threshold, and how many those of the batch are.
local function high_entropy(batch, entropy, o, whole)
  local threshold, active = whole.threshold, whole.active
  if not threshold then
    threshold, active = whole_batch.entropy_threshold(
      whole_batch.add_entropies({}, batch, entropy), o.top_entropy_quantile
    )
  end
  return batch.mask * fn.ge(entropy, threshold), active
end

--- The loss of each completion token; the caller multiplies by the weights and sums.
---@param batch table         mask, advantage: [K]; old_logp?, ref_logp?, sampler_logp?,
---   sampler_ratio?: [K]; sequence [K] i32 and completion_cu [S+1] i32
---@param logp liger.Tensor   [K] under the policy
---@param o table             of options()
---@param entropy? liger.Tensor  [K]; for top_entropy_quantile
---@param whole? table        of whole(); nil: this batch is all
---@return liger.Tensor loss  [K], nats
---@return { ratio: liger.Tensor, kl?: liger.Tensor, phi?: liger.Tensor, active?: liger.Tensor,
---   num_active?: integer } parts  for metrics, [K] each
function M.token_loss(batch, logp, o, entropy, whole)
  if o.beta > 0 and not batch.ref_logp then
    lib.raise(("grpo: beta is %g and the batch has no ref_logp"):format(o.beta))
  end
  local log_ratio = counted(batch, logp - (batch.old_logp or logp:detach()))
  local is_sequence = o.importance_sampling_level == "sequence"
  local uncapped = (is_sequence and sequence_mean(batch, log_ratio) or log_ratio):exp()
  local capped = o.clips and o.delta
  local ratio = capped and uncapped:clamp(-math.huge, o.delta) or uncapped
  local loss, phi = policy_term(batch, logp, ratio, uncapped, log_ratio, o)
  local parts = { ratio = ratio:detach(), phi = phi }
  if o.off_policy_mask_threshold then
    loss = fn.where(autograd.no_grad(near_policy, batch, logp, o), loss, 0)
  end
  if o.top_entropy_quantile < 1 then
    parts.active, parts.num_active = autograd.no_grad(
      high_entropy, batch, entropy, o, whole or {}
    )
    loss = fn.where(parts.active, loss, 0)
  end
  if batch.sampler_ratio and not phi then
    loss = loss * batch.sampler_ratio
  end
  if o.beta > 0 then
    local d = counted(batch, batch.ref_logp - logp):clamp(-math.huge, MAX_LOG_RATIO)
    local kl = d:exp() - d - 1
    if o.use_bias_correction_kl then
      kl = kl * uncapped
    end
    loss, parts.kl = loss + kl * o.beta, kl:detach()
  end
  return loss, parts
end

-- ---- the loss of a batch ----

--- The loss of a micro-batch: to be added up over those of the batch.
---@param batch liger.Pack       as in token_loss, and weight [K]
---@param logp liger.Tensor      [K]
---@param entropy liger.Tensor   [K]
---@param o table                of options()
---@param whole? table           of whole(); nil: this batch is all
---@return liger.Tensor loss     []
---@return table part            for metrics()
function M.loss(batch, logp, entropy, o, whole)
  local mask, start, tokens = batch.mask:read(), batch.completion_cu:read(), {}
  for s = 1, batch.completion_cu:numel() - 1 do
    tokens[s] = 0
    for k = start[s - 1], start[s] - 1 do
      tokens[s] = tokens[s] + (mask[k] ~= 0 and 1 or 0)
    end
  end
  local token_loss, parts = M.token_loss(batch, logp, o, entropy, whole)
  local weighted = counted(batch, token_loss * batch.weight)
  local loss, bonus = weighted, 0
  if o.entropy_coef > 0 then
    local active = parts.num_active or whole and whole.active or whole_batch.sum_of(tokens)
    bonus = o.entropy_coef / math.max(active, 1)
    loss = weighted - fn.where(parts.active or batch.mask, entropy, 0) * bonus
  end
  local sums, rows = autograd.no_grad(metrics.sums, batch, weighted, entropy, parts, o)
  return fn.sum(loss), {
    sums = sums, rows = rows, tokens = tokens, bonus = bonus, samples = batch.samples,
  }
end

return M
