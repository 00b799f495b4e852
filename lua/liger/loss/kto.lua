-- KTO (Ethayarajh et al. 2024, equation 8) with TRL's names, defaults and formulas. Each sequence
-- is one answer with a label. s = log p - log p_ref of the answer, b = beta, S the sigmoid, w the
-- weight of the label:
--   kto                desirable w (1 - S(b (s - KL)))    undesirable w (1 - S(b (KL - s)))
--   apo_zero_unpaired  the same with KL = 0
-- KL = max(0, mean of log p - log p_ref over mismatched answers), a constant: each prompt of the
-- batch with another row's answer.
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local options_of = require("liger.options")
local Tensor = require("liger.tensor")

local M = {}

M.defaults = {
  loss_type = "kto",
  beta = 0.1,
  desirable_weight = 1,
  undesirable_weight = 1,
}

M.ranges = {
  loss_type = { "kto", "apo_zero_unpaired" }, beta = { above = 0 }, desirable_weight = { min = 0 },
  undesirable_weight = { min = 0 },
}

--- The options with their defaults; raises on an unknown one and on a value out of range.
---@param options? table
---@return table
function M.options(options)
  return options_of.over("kto", M.defaults, M.ranges, options)
end

--- The KL estimate from sums over the mismatched answers of the whole batch; 0 of none.
---@param sum number     of log p - log p_ref
---@param count integer
---@return number  nats, from 0
function M.kl(sum, count)
  return math.max(sum / math.max(count, 1), 0)
end

--- The share of these answers in the loss of the whole batch, a mean over all its answers. The
--- shares of micro-batches add up to the loss of the batch in one.
---@param batch table         completion_cu [S+1] i32, labels (S booleans), ref_logps [S], kl (a
---   number of kl(); loss_type kto); total_rows?: answers in the whole batch (default: this is it)
---@param logp liger.Tensor   [K] of the completion tokens under the policy
---@param options table       of options()
---@return liger.Tensor loss  []
---@return { logps: liger.Tensor, rewards: liger.Tensor } values  [S] each, for the log
function M.loss(batch, logp, options)
  local o, kl, signs, weights = options, 0, {}, {}
  if o.loss_type == "kto" then
    kl = batch.kl or lib.raise("kto: the batch has no kl")
  end
  if not batch.ref_logps then
    lib.raise("kto: the batch has no ref_logps")
  end
  for s, label in ipairs(batch.labels) do
    signs[s] = label and o.beta or -o.beta
    weights[s] = label and o.desirable_weight or o.undesirable_weight
  end
  local logps = ops.segment_sum(logp, batch.completion_cu)
  local ratio = logps - batch.ref_logps
  local x = (ratio - kl) * Tensor.from_table(signs, logp.dtype)
  local losses = (-x):sigmoid() * Tensor.from_table(weights, logp.dtype)
  return fn.sum(losses) * (1 / (batch.total_rows or #batch.labels)), {
    logps = logps:detach(), rewards = ratio:detach() * o.beta,
  }
end

return M
