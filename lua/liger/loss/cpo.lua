-- CPO (Xu et al. 2024, equation 5), SimPO (Meng et al. 2024, equation 6) and AlphaPO (Gupta et al.
-- 2025), with TRL's names, defaults and formulas; no reference. The sequences are pairs, all chosen
-- ones first. c, r: log p of the chosen and the rejected answer, summed for sigmoid and hinge,
-- averaged over the answer for ipo and simpo; d = c - r, b = beta, e = label_smoothing, S the
-- sigmoid:
--   sigmoid  -(1-e) log S(b d) - e log S(-b d)
--   simpo    the same of b d - simpo_gamma; with alpha not 0 of scores (1 - e^(-alpha x)) / alpha
--   hinge    max(0, 1 - b d)
--   ipo      (d - 1/(2b))^2
-- and cpo_alpha times the negative log p of the chosen answers over their tokens is added to each.
local fn = require("liger.fn")
local ops = require("liger.ops")
local options_of = require("liger.options")
local pack = require("liger.nn.pack")

local M = {}

-- e^x is capped here, its gradient then 0: fp32 overflows at 88.
local MAX_EXPONENT = 80

M.defaults = {
  loss_type = "sigmoid",
  beta = 0.1,
  label_smoothing = 0, -- share of pairs whose labels are taken to be swapped
  cpo_alpha = 1, -- weight of the chosen answers' NLL; 0 makes simpo pure SimPO
  simpo_gamma = 0.5, -- margin
  alpha = 0, -- of AlphaPO; 0: the log-probability itself
}

local of_simpo = { "loss_type", "simpo" }

M.ranges = {
  loss_type = { "sigmoid", "hinge", "ipo", "simpo" }, beta = { above = 0 },
  label_smoothing = { min = 0, max = 0.5, with = { "loss_type", "sigmoid", "simpo" } },
  cpo_alpha = { min = 0 }, simpo_gamma = { min = 0, with = of_simpo }, alpha = { with = of_simpo },
}

--- The options with their defaults; raises on an unknown one, on a value out of range and on one
--- that the loss does not read.
---@param options? table
---@return table
function M.options(options)
  return options_of.over("cpo", M.defaults, M.ranges, options)
end

local function logistic(x, smoothing)
  return -x:log_sigmoid() * (1 - smoothing) - (-x):log_sigmoid() * smoothing
end

local LOSS = {}

function LOSS.sigmoid(d, o)
  return logistic(d * o.beta, o.label_smoothing)
end

function LOSS.simpo(d, o)
  return logistic(d * o.beta - o.simpo_gamma, o.label_smoothing)
end

function LOSS.hinge(d, o)
  local x = 1 - d * o.beta
  return x * fn.gt(x, 0)
end

function LOSS.ipo(d, o)
  return (d - 1 / (2 * o.beta)) ^ 2
end

--- The share of these pairs in the loss of the whole batch: the mean over its pairs, and the NLL
--- over its chosen tokens. The shares of micro-batches add up to the loss of the batch in one.
---@param batch table         completion_cu [2P+1] i32; total_rows?, total_tokens?: pairs and chosen
---   tokens of the whole batch (default: this is it)
---@param logp liger.Tensor   [K] of the completion tokens
---@param options table       of options()
---@return liger.Tensor loss  []
---@return { logps: liger.Tensor, rewards: liger.Tensor, parts: table } values  for the log: [2P]
---   each, log p as the loss takes it; parts.nll_loss []
function M.loss(batch, logp, options)
  local o, cu = options, batch.completion_cu
  local is_mean = o.loss_type == "simpo" or o.loss_type == "ipo"
  local logps = is_mean and fn.segment_mean(logp, cu) or ops.segment_sum(logp, cu)
  local score = logps
  if o.alpha ~= 0 then
    score = (1 - (logps * -o.alpha):clamp(-math.huge, MAX_EXPONENT):exp()) / o.alpha
  end
  local chosen, rejected = pack.halves(score)
  local P = chosen:size(1)
  local tokens = cu:read()[P]
  local loss = fn.sum(LOSS[o.loss_type](chosen - rejected, o)) * (1 / (batch.total_rows or P))
  local nll
  if o.cpo_alpha > 0 then
    local total = math.max(batch.total_tokens or tokens, 1)
    nll = fn.sum(logp:narrow(1, 1, tokens)) * (-1 / total)
    loss = loss + nll * o.cpo_alpha
  end
  return loss, {
    logps = logps:detach(), rewards = score:detach() * o.beta,
    parts = { nll_loss = nll and nll:detach() or fn.full_like(loss, 0) },
  }
end

return M
