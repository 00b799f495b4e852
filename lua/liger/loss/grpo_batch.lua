-- What GRPO's loss takes from the whole batch, so that a cut into micro-batches changes nothing:
-- the weights of tokens, the sampler's ratios, the threshold of entropies. Plain numbers, known
-- before the forward, all but the last.
local autograd = require("liger.autograd")
local ranks = require("liger.ranks")

local M = {}

--- Sum of a list of numbers.
function M.sum_of(list)
  local sum = 0
  for _, x in ipairs(list) do
    sum = sum + x
  end
  return sum
end

--- Weight of every token of each sample, by the counts of the whole batch, so that a split into
--- micro-batches changes nothing.
---@param lengths integer[]  tokens that count, a sample; 0 for a sample that is masked
---@param o table            of options()
---@return number[]  one a sample
function M.weights(lengths, o)
  local tokens, weights, kind = math.max(M.sum_of(lengths), 1), {}, o.loss_type
  for s, n in ipairs(lengths) do
    if kind == "grpo" or kind == "sapo" then
      weights[s] = 1 / (math.max(n, 1) * #lengths)
    elseif kind == "dr_grpo" then
      weights[s] = 1 / (#lengths * o.max_completion_length)
    elseif kind == "luspo" then
      weights[s] = 1 / #lengths
    else
      weights[s] = 1 / (kind ~= "bnpo" and o.num_items_in_batch or tokens)
    end
  end
  return weights
end

local function sampler_ratio(s, o)
  local ratios, total, is_sequence = {}, 0, o.sampler_mode:find("^sequence")
  for j, old in ipairs(s.old_logp) do
    local d = old - s.sampler_logp[j]
    d = d == d and d or 0
    ratios[j], total = math.exp(d), total + d
  end
  local low, high = o.sampler_clip_min or 0, o.sampler_clip_max
  for j = 1, #ratios do
    local r = is_sequence and math.exp(total) or ratios[j]
    if o.sampler_mode:find("truncate$") then
      ratios[j] = math.max(low, math.min(r, high))
    else
      ratios[j] = (r >= low and r <= high) and r or 0
    end
  end
  return ratios, is_sequence
end

--- Gives each sample its `sampler_ratio`: that of the old policy to what the sampler drew from, a
--- token or a sequence, truncated or 0 outside the bounds. NaN counts as 1.
---@param samples table[]  with old_logp and sampler_logp, a number a completion token
---@param o table          of options(), with a sampler_mode
---@return table<string, number> metrics
function M.sampler_ratios(samples, o)
  local differences, ratios, most = {}, {}, 0
  local low, high = math.huge, 0
  for _, s in ipairs(samples) do
    local list, is_sequence = sampler_ratio(s, o)
    s.sampler_ratio = list
    for j, r in ipairs(s.masked and {} or list) do
      local d = math.abs(s.old_logp[j] - s.sampler_logp[j])
      d = d == d and d or 0
      differences[#differences + 1], most = d, math.max(most, d)
      if j == 1 or not is_sequence then
        ratios[#ratios + 1], low, high = r, math.min(low, r), math.max(high, r)
      end
    end
  end
  return {
    ["sampling/sampling_logp_difference/mean"] = M.sum_of(differences) / math.max(#differences, 1),
    ["sampling/sampling_logp_difference/max"] = most,
    ["sampling/importance_sampling_ratio/min"] = #ratios > 0 and low or 0,
    ["sampling/importance_sampling_ratio/mean"] = M.sum_of(ratios) / math.max(#ratios, 1),
    ["sampling/importance_sampling_ratio/max"] = high,
  }
end

--- The (1 - share) quantile of the entropies, linear between two of them, and how many reach it. A
--- NaN lets all in, so that the loss shows it.
---@param values number[]  sorted here
---@param share number
---@return number threshold
---@return integer reached
function M.entropy_threshold(values, share)
  for _, x in ipairs(values) do
    if x ~= x then
      return -math.huge, #values
    end
  end
  table.sort(values)
  local at = (1 - share) * math.max(#values - 1, 0)
  local below, above = values[math.floor(at) + 1], values[math.ceil(at) + 1]
  local threshold, reached = below and below + (at - math.floor(at)) * (above - below) or 0, 0
  for _, x in ipairs(values) do
    reached = reached + (x >= threshold and 1 or 0)
  end
  return threshold, reached
end

--- Adds the entropies of the tokens that count to `values`. Waits for the device.
---@param values number[]
---@param batch table      mask [K]
---@param entropy liger.Tensor  [K]
---@return number[] values
function M.add_entropies(values, batch, entropy)
  local mask, data = batch.mask:read(), entropy:read()
  for k = 0, batch.mask:numel() - 1 do
    if mask[k] ~= 0 then
      values[#values + 1] = data[k]
    end
  end
  return values
end

--- What the loss of a micro-batch must know of the whole batch: how many tokens are active and the
--- least entropy of these. A top_entropy_quantile below 1 takes a forward of its own where the
--- batch is cut.
---@param batch liger.Batch
---@param o table             of options()
---@param max_tokens integer  a micro-batch, as in batch:split
---@param logprob fun(micro: liger.Pack): liger.Tensor, liger.Tensor  [K] logp and entropy
---@return { active?: integer, threshold?: number }
function M.whole(batch, o, max_tokens, logprob)
  if o.top_entropy_quantile == 1 then
    return { active = M.sum_of(batch:lengths()) }
  end
  local micros = {}
  for micro in batch:split(max_tokens, true) do
    micros[#micros + 1] = micro
  end
  if ranks.size == 1 and #micros < 2 then
    return {} -- the forward of the loss tells
  end
  local values = {}
  for _, micro in ipairs(micros) do
    local _, entropy = autograd.no_grad(logprob, micro)
    M.add_entropies(values, micro, entropy)
  end
  local threshold, active = M.entropy_threshold(ranks.join(values), o.top_entropy_quantile)
  return { active = active, threshold = threshold }
end

return M
