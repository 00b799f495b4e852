-- Supervised fine-tuning: the sum of the targets' negative log-probabilities over the number of targets in the whole batch, all
-- micro-batches and devices together (TRL's num_items_in_batch).
local M = {}

--- The loss of a micro-batch, its gradients on the way.
---@param model liger.Decoder
---@param batch liger.Pack
---@param num_items integer  targets of the whole batch
---@return liger.Tensor loss  []
---@return table rows         loss, entropy, predicted: [N]
function M.loss(model, batch, num_items)
  return model:cross_entropy(batch, 1 / math.max(num_items, 1))
end

--- Numbers for the log from `rows`: sums, to be divided by the counts of all micro-batches.
---@param batch liger.Pack
---@param rows table
---@return { loss: number, entropy: number, correct: number, tokens: integer }
function M.sums(batch, rows)
  local target, predicted = batch.target:data(), rows.predicted:data()
  local loss, entropy = rows.loss:data(), rows.entropy:data()
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
