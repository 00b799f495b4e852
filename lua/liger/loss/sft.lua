-- Supervised fine-tuning: the sum of the targets' negative log-probabilities over the number of
-- targets in the whole batch, all micro-batches together (TRL's num_items_in_batch):
-- model:cross_entropy(batch, 1 / targets).
local M = {}

--- Numbers for the log from `rows`: sums, to be divided by the counts of all micro-batches.
---@param batch liger.Pack
---@param rows table
---@return { loss: number, entropy: number, correct: number, tokens: integer }
function M.sums(batch, rows)
  local target, predicted = batch.target:read(), rows.predicted:read()
  local loss, entropy = rows.loss:read(), rows.entropy:read()
  local sums = { loss = 0, entropy = 0, correct = 0, tokens = 0 }
  for i = 0, batch.num_tokens - 1 do
    if target[i] >= 0 then
      sums.loss = sums.loss + loss[i]
      sums.entropy = sums.entropy + entropy[i]
      sums.correct = sums.correct + (predicted[i] == target[i] and 1 or 0)
      sums.tokens = sums.tokens + 1
    end
  end
  return sums
end

return M
