-- Supervised fine-tuning: the sum of the targets' negative log-probabilities over the number of
-- targets in the whole batch, all micro-batches together (TRL's num_items_in_batch):
-- model:cross_entropy(batch, 1 / targets).
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local ops = require("liger.ops")
local ranks = require("liger.ranks")
local Tensor = require("liger.tensor")

local M = {}

local NAMES = { "loss", "entropy", "correct", "tokens" }

local function sums(batch, rows)
  local dtype = rows.loss.dtype
  local target = batch.target:to(dtype)
  local mask, y = fn.ge(target, 0), Tensor.empty({ #NAMES }, dtype)
  local x = {
    loss = rows.loss, entropy = rows.entropy, correct = fn.eq(rows.predicted:to(dtype), target),
    tokens = mask,
  }
  for i, name in ipairs(NAMES) do
    ops.raw.sum(fn.where(mask, x[name], 0), y:row(i))
  end
  return y
end

--- What the log needs of a micro-batch, left on the device until the step ends.
---@param batch liger.Pack
---@param rows table  of model:cross_entropy
---@return liger.Tensor  [4], for total()
function M.sums(batch, rows)
  return autograd.no_grad(sums, batch, rows)
end

--- Sums over the targets of all micro-batches of all processes, to be divided by `tokens`, their
--- number. Waits for the device once.
---@param parts liger.Tensor[]  of sums()
---@return { loss: number, entropy: number, correct: integer, tokens: integer }
function M.total(parts)
  local data, total = #parts > 0 and Tensor.read_all(parts), {}
  for i, name in ipairs(NAMES) do
    total[name] = 0
    for p = 0, #parts - 1 do
      total[name] = total[name] + data[p * #NAMES + i - 1]
    end
  end
  return ranks.sum(total)
end

return M
