-- PPO (Schulman et al. 2017, equations 7 and 9) on completion tokens, with a value head. With ratio
-- r = exp(logp - old_logp), advantage A, return R, value v = hidden . weight + bias:
--   policy  max(-A r, -A clip(r, 1 - cliprange, 1 + cliprange))
--   value   max((v - R)^2, (clip(v, v_old - cliprange_value, v_old + cliprange_value) - R)^2) / 2
--   loss    mean policy + vf_coef mean value - entropy_coef mean entropy, over tokens
-- and generalised advantage estimation (Schulman et al. 2016, equation 16).
local fn = require("liger.fn")
local ops = require("liger.ops")
local lib = require("liger.ffi")
local options_of = require("liger.options")

local M = {}

M.defaults = {
  cliprange = 0.2,
  cliprange_value = 0.2,
  vf_coef = 0.1,
  entropy_coef = 0,
}

local from_0 = { min = 0 }
M.ranges = {
  cliprange = from_0, cliprange_value = from_0, vf_coef = from_0, entropy_coef = from_0,
}

--- The options with their defaults; raises on an unknown one and on a value out of range.
---@param options? table
---@return table
function M.options(options)
  return options_of.over("ppo", M.defaults, M.ranges, options)
end

--- The value head.
---@param hidden liger.Tensor  [N,C]
---@param weight liger.Tensor  [C]
---@param bias? liger.Tensor   [1]
---@return liger.Tensor        [N]
function M.value(hidden, weight, bias)
  local C = weight:numel()
  return ops.linear(hidden, weight:reshape(1, C), bias):reshape(hidden:size(1))
end

--- Advantages and returns of one completion from its token rewards and values:
--- A_t = sum over l of (gamma lambda)^l delta_(t+l), delta_t = reward_t + gamma v_(t+1) - v_t;
--- after the last token the value is 0.
---@param rewards number[]
---@param values number[]
---@param gamma number   discount, 0 to 1
---@param lambda number  0 to 1
---@return number[] advantages
---@return number[] returns  advantage + value
function M.gae(rewards, values, gamma, lambda)
  if #rewards ~= #values then
    lib.raise(("gae: %d values, wanted one for each of %d rewards"):format(#values, #rewards))
  end
  local advantages, returns, next_value, sum = {}, {}, 0, 0
  for t = #rewards, 1, -1 do
    sum = rewards[t] + gamma * next_value - values[t] + gamma * lambda * sum
    advantages[t], returns[t], next_value = sum, sum + values[t], values[t]
  end
  return advantages, returns
end

-- a where it is more than b; of equal ones the first has the gradient.
local function larger(a, b)
  return fn.where(fn.ge(a, b), a, b)
end

local function half_square(x)
  return x ^ 2 / 2
end

--- The share of these tokens in the loss of the whole batch, a mean over its tokens. The shares of
--- micro-batches add up to the loss of the batch in one.
---@param batch table         advantage, old_logp: [K]; with vf_coef: returns, old_value: [K];
---   total_tokens?: of the whole batch (default: this is it)
---@param logp liger.Tensor   [K] of the completion tokens under the policy
---@param entropy liger.Tensor  [K]
---@param value? liger.Tensor [K] of the value head, with vf_coef
---@param options table       of options()
---@return liger.Tensor loss  []
---@return table<string, liger.Tensor> metrics  shares [] of policy_loss, value_loss, entropy,
---   approx_kl, policy_clip_fraction and value_clip_fraction
function M.loss(batch, logp, entropy, value, options)
  local o, A = options, batch.advantage
  local share = 1 / math.max(batch.total_tokens or logp:numel(), 1)
  local log_ratio = logp - batch.old_logp
  local ratio = log_ratio:exp()
  local plain, clipped = -A * ratio, -A * ratio:clamp(1 - o.cliprange, 1 + o.cliprange)
  local policy_loss = fn.sum(larger(plain, clipped)) * share
  local mean_entropy = fn.sum(entropy) * share
  local loss = policy_loss - mean_entropy * o.entropy_coef
  local metrics = {
    policy_loss = policy_loss:detach(), entropy = mean_entropy:detach(),
    approx_kl = fn.sum(half_square(log_ratio:detach())) * share,
    policy_clip_fraction = fn.sum(fn.gt(clipped, plain)) * share,
  }
  if value then
    local old, range = batch.old_value, o.cliprange_value
    local near = old + (value - old):clamp(-range, range)
    local free, held = half_square(value - batch.returns), half_square(near - batch.returns)
    local value_loss = fn.sum(larger(free, held)) * share
    loss = loss + value_loss * o.vf_coef
    metrics.value_loss = value_loss:detach()
    metrics.value_clip_fraction = fn.sum(fn.gt(held, free)) * share
  end
  return loss, metrics
end

return M
