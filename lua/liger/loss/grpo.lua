-- GRPO (Shao et al. 2024, equation 3) and its kin, with TRL's names, defaults and formulas. For
-- completion token t of sample s,
--   ratio r = exp(logp - old_logp), of the token, or the mean over the sequence (GSPO)
--   loss    = -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta KL
--   KL      = exp(d) - d - 1, d = ref_logp - logp (k3, Schulman 2020), times r with
--   use_bias_correction_kl
-- and the loss types differ in the weight of a token:
--   grpo     1 / (samples * tokens of its sample)
--   bnpo     1 / tokens of the batch
--   dapo     1 / tokens of the batch over all devices (num_items_in_batch)
--   dr_grpo  1 / (samples * max_completion_length)
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")

local M = {}

-- Above this exponent k3 is capped and its gradient is 0: exp overflows fp32 at 88.
local MAX_LOG_RATIO = 20

M.defaults = {
  loss_type = "dapo",
  epsilon = 0.2,
  epsilon_high = false, -- default: epsilon
  delta = false, -- cap of the ratio before the minimum
  beta = 0,
  use_bias_correction_kl = true,
  importance_sampling_level = "token",
  max_completion_length = false, -- of dr_grpo
  num_items_in_batch = false, -- of dapo; default: the tokens that count
}

local LOSS_TYPES = { grpo = true, bnpo = true, dapo = true, dr_grpo = true }

--- The options with their defaults; raises on an unknown one and on a value out of range.
---@param options? table
---@return table
function M.options(options)
  local o = {}
  for key, value in pairs(M.defaults) do
    o[key] = value
  end
  for key, value in pairs(options or {}) do
    if M.defaults[key] == nil then
      lib.raise(("grpo: unknown option %s"):format(tostring(key)))
    end
    o[key] = value
  end
  if not LOSS_TYPES[o.loss_type] then
    lib.raise(
      ("grpo: loss_type is %s, wanted grpo, bnpo, dapo or dr_grpo"):format(tostring(o.loss_type))
    )
  end
  if o.importance_sampling_level ~= "token" and o.importance_sampling_level ~= "sequence" then
    lib.raise(
      ("grpo: importance_sampling_level is %s, wanted token or sequence"):format(
        tostring(o.importance_sampling_level)
      )
    )
  end
  if o.loss_type == "dr_grpo" and not o.max_completion_length then
    lib.raise("grpo: loss_type dr_grpo needs max_completion_length")
  end
  if type(o.use_bias_correction_kl) ~= "boolean" then
    lib.raise(
      ("grpo: use_bias_correction_kl is %s, wanted true or false"):format(
        tostring(o.use_bias_correction_kl)
      )
    )
  end
  o.epsilon_high = o.epsilon_high or o.epsilon
  for _, key in ipairs({ "epsilon", "epsilon_high", "beta" }) do
    if type(o[key]) ~= "number" or o[key] ~= o[key] or o[key] < 0 then
      lib.raise(("grpo: %s is %s, wanted a number from 0"):format(key, tostring(o[key])))
    end
  end
  for _, key in ipairs({ "delta", "max_completion_length", "num_items_in_batch" }) do
    if o[key] and not (type(o[key]) == "number" and o[key] > 0) then
      lib.raise(("grpo: %s is %s, wanted a number above 0"):format(key, tostring(o[key])))
    end
  end
  return o
end

--- Weight of every token of each sample, by the counts of the whole batch, so that a split into
--- micro-batches changes nothing.
---@param lengths integer[]  tokens that count, a sample; 0 for a sample that is masked
---@param options table
---@return number[]  one a sample
function M.weights(lengths, options)
  local tokens, weights = 0, {}
  for _, n in ipairs(lengths) do
    tokens = tokens + n
  end
  for s, n in ipairs(lengths) do
    if options.loss_type == "grpo" then
      weights[s] = 1 / (math.max(n, 1) * #lengths)
    elseif options.loss_type == "dr_grpo" then
      weights[s] = 1 / (#lengths * options.max_completion_length)
    elseif options.loss_type == "dapo" then
      weights[s] = 1 / math.max(options.num_items_in_batch or tokens, 1)
    else
      weights[s] = 1 / math.max(tokens, 1)
    end
  end
  return weights
end

-- a - b where the mask counts a token, else 0: a NaN that stands in a masked place stays out of the
-- gradient too.
local function difference(batch, a, b)
  return fn.where(batch.mask, a - b, 0)
end

-- Mean of x, 0 where masked, over each sequence's counted tokens, given back to every token of it.
local function sequence_mean(batch, x)
  local cu = batch.completion_cu
  local sums = ops.segment_sum(x, cu)
  local counts = ops.segment_sum(batch.mask, cu):clamp(1, math.huge)
  return ops.gather(ops.div(sums, counts), batch.sequence)
end

--- The loss of each completion token; the caller multiplies by the weights and sums.
---@param batch table         mask, advantage: [K]; old_logp?, ref_logp?: [K]; sequence [K] i32 and
---   completion_cu [S+1] i32
---@param logp liger.Tensor   [K] under the policy
---@param options table       of options()
---@return liger.Tensor loss  [K], nats
---@return { ratio: liger.Tensor, kl?: liger.Tensor } parts  for metrics, [K] each
function M.token_loss(batch, logp, options)
  local o = options
  if o.beta > 0 and not batch.ref_logp then
    lib.raise(("grpo: beta is %g and the batch has no ref_logp"):format(o.beta))
  end
  local log_ratio = difference(batch, logp, batch.old_logp or logp:detach())
  if o.importance_sampling_level == "sequence" then
    log_ratio = sequence_mean(batch, log_ratio)
  end
  local ratio = log_ratio:exp()
  local capped = o.delta and fn.minimum(ratio, o.delta) or ratio
  local clipped = ratio:clamp(1 - o.epsilon, 1 + o.epsilon_high)
  local loss = -fn.minimum(capped * batch.advantage, clipped * batch.advantage)
  local kl
  if o.beta > 0 then
    local d = difference(batch, batch.ref_logp, logp):clamp(-math.huge, MAX_LOG_RATIO)
    kl = d:exp() - d - 1
    if o.use_bias_correction_kl then
      kl = kl * capped
    end
    loss = loss + kl * o.beta
  end
  return loss, { ratio = capped:detach(), kl = kl and kl:detach() }
end

-- Counts of one sequence's tokens, its entropy and KL added to the sums.
local function count_sequence(sums, first, last, values, options)
  local mask, ratio, advantage = values.mask, values.ratio, values.advantage
  local tokens, low, high = 0, 0, 0
  for k = first, last do
    if mask[k] ~= 0 then
      tokens = tokens + 1
      sums.entropy = sums.entropy + values.entropy[k]
      sums.kl = sums.kl + (values.kl and values.kl[k] or 0)
      if ratio[k] < 1 - options.epsilon and advantage[k] < 0 then
        low = low + 1
      elseif ratio[k] > 1 + options.epsilon_high and advantage[k] > 0 then
        high = high + 1
      end
    end
  end
  return tokens, low, high
end

--- Numbers for the log: sums over the tokens that count, to be added up over micro-batches and
--- given to `metrics`. Clipping is counted where it binds: low where r < 1 - epsilon and A < 0,
--- high where r > 1 + epsilon_high and A > 0. low_min and high_max are over sequences.
---@param batch table
---@param entropy liger.Tensor [K]
---@param parts table          what token_loss returned
---@param options table
---@param sums? table          of the micro-batches before
---@return table sums
function M.sums(batch, entropy, parts, options, sums)
  sums = sums or {
    tokens = 0, sequences = 0, entropy = 0, kl = 0, low = 0, high = 0, low_min = 1, high_max = 0,
  }
  local values = {
    mask = batch.mask:read(), advantage = batch.advantage:read(),
    ratio = parts.ratio:read(), entropy = entropy:read(), kl = parts.kl and parts.kl:read(),
  }
  local start, whole = batch.completion_cu:read(), options.importance_sampling_level == "sequence"
  for s = 0, batch.completion_cu:numel() - 2 do
    local tokens, low, high = count_sequence(sums, start[s], start[s + 1] - 1, values, options)
    local n = math.max(tokens, 1)
    sums.tokens, sums.sequences = sums.tokens + tokens, sums.sequences + 1
    -- A ratio of the sequence counts once, whatever its length.
    sums.low = sums.low + (whole and low / n or low)
    sums.high = sums.high + (whole and high / n or high)
    sums.low_min = math.min(sums.low_min, low / n)
    sums.high_max = math.max(sums.high_max, high / n)
  end
  return sums
end

--- TRL's metrics from the sums of all micro-batches; none where nothing was trained on.
---@param sums table|nil  nil: no token had a gradient
---@param options table
---@return table<string, number>
function M.metrics(sums, options)
  local tokens = sums and sums.tokens or 0
  if tokens == 0 then
    return {}
  end
  local clips = options.importance_sampling_level == "sequence" and sums.sequences or tokens
  return {
    entropy = sums.entropy / tokens,
    kl = options.beta > 0 and sums.kl / tokens or nil,
    ["clip_ratio/low_mean"] = sums.low / clips,
    ["clip_ratio/low_min"] = sums.low_min,
    ["clip_ratio/high_mean"] = sums.high / clips,
    ["clip_ratio/high_max"] = sums.high_max,
    ["clip_ratio/region_mean"] = (sums.low + sums.high) / clips,
  }
end

return M
