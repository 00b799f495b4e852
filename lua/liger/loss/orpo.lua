-- ORPO (Hong et al. 2024, equations 6 to 8) as TRL has it; no reference. The sequences are pairs,
-- all chosen ones first. With c, r the mean log p over the tokens of the chosen and the rejected
-- answer,
--   log odds ratio  z = c - r - (log(1 - e^c) - log(1 - e^r))
--   loss            -beta mean of log S(z) - log p of prompts and chosen answers over their tokens
-- In log(1 - e^x) x is at most -1e-10: a model that is sure of an answer has x = 0, where the value
-- is minus infinity. Beyond the bound its gradient is 0.
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local ops = require("liger.ops")
local options_of = require("liger.options")
local pack = require("liger.nn.pack")
local Tensor = require("liger.tensor")

local M = {}

local HIGHEST = -1e-10

M.defaults = { beta = 0.1 } -- weight of the odds ratio's term, lambda in the paper

M.ranges = { beta = { min = 0 } }

--- The options with their defaults; raises on an unknown one and on a value out of range.
---@param options? table
---@return table
function M.options(options)
  return options_of.over("orpo", M.defaults, M.ranges, options)
end

-- e^x and 1 - e^x. Near 0 the rounding of e^x is undone by its own logarithm (Kahan).
local function complement(x)
  local y = x:exp()
  local near = fn.where(fn.eq(y, 1), -x, (1 - y) * x / y:log())
  return y, fn.where(fn.gt(x, -0.5), near, 1 - y)
end

--- log(1 - e^x) without cancellation.
---@param x liger.Tensor  [*] below 0
---@return liger.Tensor   [*]
M.log1mexp = autograd.rule("log1mexp", function(saved, x)
  local y, rest = complement(x)
  saved.slope = -y / rest
  return rest:log()
end, function(saved, dy)
  return dy * saved.slope
end)

-- The odd ones of [2S] sums, of answers; the even ones are of prompts.
local function of_answers(sums)
  local index = {}
  for s = 1, sums:numel() / 2 do
    index[s] = 2 * s - 1
  end
  return ops.gather(sums, Tensor.from_table(index, "i32"))
end

-- Mean over each answer; 0 for an empty one.
local function answer_means(batch, logp)
  return of_answers(fn.segment_mean(logp, batch.answer_cu))
end

--- The share of these pairs in the loss of the whole batch: the mean over its pairs, and the NLL
--- over its chosen sequences' tokens. The shares of micro-batches add up to the loss of the batch
--- in one.
---@param batch table         answer_cu [4P+1] i32: where the prompt's and the answer's tokens of
---   each sequence start in logp; total_rows?, total_tokens?: pairs and chosen sequences' predicted
---   tokens in the whole batch (default: this is it)
---@param logp liger.Tensor   [K] of prompt and answer tokens; the rejected half may lack its
---   prompts
---@param options table       of options()
---@return liger.Tensor loss  []
---@return { logps: liger.Tensor, rewards: liger.Tensor, parts: table } values  for the log: [2P]
---   each, of the answers; parts: nll_loss, log_odds_ratio, log_odds_chosen, []
function M.loss(batch, logp, options)
  local means = answer_means(batch, logp)
  local bounded = means:clamp(-math.huge, HIGHEST)
  local chosen, rejected = pack.halves(means)
  local chosen_rest, rejected_rest = pack.halves(M.log1mexp(bounded))
  local z = chosen - rejected - (chosen_rest - rejected_rest)
  local P = z:numel()
  local share = 1 / (batch.total_rows or P)
  local ratio = fn.sum(z:log_sigmoid()) * share
  local tokens = batch.answer_cu:read()[2 * P]
  local total = math.max(batch.total_tokens or tokens, 1)
  local nll = fn.sum(logp:narrow(1, 1, tokens)) * (-1 / total)
  return nll - ratio * options.beta, {
    logps = means:detach(), rewards = means:detach() * options.beta,
    parts = {
      nll_loss = nll:detach(), log_odds_ratio = ratio:detach(),
      log_odds_chosen = fn.sum(z:detach()) * share,
    },
  }
end

return M
