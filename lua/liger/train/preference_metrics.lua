-- TRL's metrics of the preference methods, from sums that stay on the device until the step ends.
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local ops = require("liger.ops")
local ranks = require("liger.ranks")
local Tensor = require("liger.tensor")

local M = {}

local SIDES = { "chosen", "rejected" }

-- ---- what the answers' logits say ----

-- 1 where a position predicts a token of a chosen answer, or of a rejected one, and how many do:
-- [N,2] and the first column alone, [N], both fp32. Of a batch with prompts only answers count.
local function answer_masks(batch)
  local N, labels = batch.num_tokens, batch.labels
  local sides, chosen = Tensor.stage({ N, 2 }, "f32"), Tensor.stage({ N }, "f32")
  local side_data, chosen_data, count = sides:data(), chosen:data(), { 0, 0 }
  for n = 0, N - 1 do
    side_data[2 * n], side_data[2 * n + 1], chosen_data[n] = 0, 0, 0
  end
  local S = batch.completion_cu:numel() - 1
  local start, rows = (batch.answer_cu or batch.completion_cu):read(), batch.rows:read()
  for s = 0, S - 1 do
    local first = batch.answer_cu and 2 * s + 1 or s
    local is_chosen = s < S / 2
    if labels then
      is_chosen = labels[s + 1]
    end
    for k = start[first], start[first + 1] - 1 do
      side_data[2 * rows[k] + (is_chosen and 0 or 1)] = 1
      chosen_data[rows[k]] = is_chosen and 1 or 0
    end
    local side = is_chosen and 1 or 2
    count[side] = count[side] + start[first + 1] - start[first]
  end
  return sides, chosen, count
end

-- Sums over the answers' tokens of the mean logit, [2,1]. Without a cap, which no model here has,
-- the mean over the vocabulary of x w^T + b is x . mean of w's rows + mean of b: the states are
-- summed in fp32 (or double), as a weight's gradient is, and the rows of w as that of a bias.
local function sum_logits(hidden, head, bias, sides, count)
  local V, C, dtype = head:size(1), head:size(2), hidden.dtype
  local acc = dtype == "f64" and "f64" or "f32"
  local sum, row = fn.zeros(2, C, acc), fn.zeros(C, acc)
  ops.raw.linear_backward(sides:to(dtype), hidden, fn.zeros(2, C, dtype), nil, sum, nil)
  ops.raw.linear_backward(head, fn.zeros(V, 1, dtype), fn.zeros(C, 1, dtype), nil, nil, row)
  local y = ops.linear(sum, ops.affine(row, 1 / V, 0):reshape(1, C))
  if bias then
    local tokens = Tensor.from_table({ { count[1] }, { count[2] } }, acc)
    y = y + ops.linear(tokens, fn.mean(bias:to(acc)):reshape(1, 1))
  end
  return y
end

--- What the log has of a micro-batch's logits.
---@param batch table            num_tokens, rows, target, completion_cu, or answer_cu, and labels?
---@param hidden liger.Tensor    [N,C]
---@param head liger.Tensor      [V,C]
---@param outputs table          entropy, lse: [K]; predicted [N] i32
---@param bias? liger.Tensor     [V]
---@return table seen            for sums(): hidden, lse, entropy? (none of ORPO), and sums
function M.seen(batch, hidden, head, outputs, bias)
  return autograd.no_grad(function()
    local sides, chosen, count = answer_masks(batch)
    local acc = outputs.lse.dtype
    local right = fn.eq(outputs.predicted:to(acc), batch.target:to(acc))
    return {
      hidden = hidden, lse = outputs.lse, entropy = not batch.answer_cu and outputs.entropy or nil,
      answers = count, correct = fn.sum(right * chosen:to(acc)),
      logits = sum_logits(hidden:detach(), head:detach(), bias and bias:detach(), sides, count),
    }
  end)
end

--- The policy's log-probabilities of a micro-batch, and what the log has of its logits.
---@param model liger.Decoder
---@param batch liger.Pack
---@return liger.Tensor logp  [K]
---@return table seen         of seen()
function M.logprob(model, batch)
  local hidden, outputs = model:hidden(batch), {}
  local logp
  logp, outputs.entropy, outputs.lse, outputs.predicted = model:logprob(
    batch, { predicted = true }, hidden
  )
  return logp, M.seen(batch, hidden, model.weights.head, outputs)
end

-- ---- a batch's sums ----

--- What the log needs of a micro-batch, left on the device until the step ends.
---@param batch table             completion_cu, total_rows?; labels?: single answers, true is
---   chosen
---@param loss liger.Tensor       [] its share
---@param values table            logps, rewards: [S]; parts?: further numbers for the log, shares
---   []
---@param seen? table             of logprob()
---@return table                  for total()
function M.sums(batch, loss, values, seen)
  return autograd.no_grad(function()
    local S, labels = values.logps:numel(), batch.labels
    local rows = labels and S or S / 2
    local part = {
      rows = rows, scale = batch.total_rows or rows, labels = labels, sequences = S,
      tensors = { loss:detach() }, names = { "loss" },
    }
    for name, x in pairs(values.parts or {}) do
      part.names[#part.names + 1], part.tensors[#part.tensors + 1] = name, x
    end
    if seen and seen.entropy then
      part.tokens = seen.entropy:numel()
      part.tensors[#part.tensors + 1] = fn.sum(seen.entropy)
    end
    if seen then
      part.answers = seen.answers
      part.tensors[#part.tensors + 1] = seen.logits
      part.tensors[#part.tensors + 1] = seen.correct
    end
    part.tensors[#part.tensors + 1] = values.logps
    part.tensors[#part.tensors + 1] = values.rewards
    return part
  end)
end

local function add(total, key, value)
  total[key] = (total[key] or 0) + value
end

-- Adds a part whose values stand in data from `at` on; the place behind them.
local function add_part(total, part, data, at)
  add(total, "rows", part.rows)
  total.means = total.means or {}
  for _, name in ipairs(part.names) do
    add(total.means, name, data[at] * part.scale)
    at = at + 1
  end
  if part.tokens then
    add(total, "tokens", part.tokens)
    add(total, "entropy", data[at])
    at = at + 1
  end
  if part.answers then
    for i, side in ipairs(SIDES) do
      add(total, "tokens/" .. side, part.answers[i])
      add(total, "logits/" .. side, data[at + i - 1])
    end
    add(total, "correct", data[at + 2])
    at = at + 3
  end
  local S, labels = part.sequences, part.labels
  local rewards = at + S
  for s = 0, S - 1 do
    local is_chosen = s < part.rows
    if labels then
      is_chosen = labels[s + 1]
    elseif is_chosen then
      add(total, "right", data[rewards + s] > data[rewards + s + part.rows] and 1 or 0)
    end
    local side = is_chosen and "chosen" or "rejected"
    add(total, side, 1)
    add(total, "logps/" .. side, data[at + s])
    add(total, "rewards/" .. side, data[rewards + s])
  end
  return rewards + S
end

--- Adds up the parts of a batch, or of several. Waits for the device once.
---@param parts table[]  of sums()
---@param total? table   to add to
---@return table
function M.total(parts, total)
  local tensors, at = {}, 0
  for _, part in ipairs(parts) do
    for _, x in ipairs(part.tensors) do
      tensors[#tensors + 1] = x
    end
  end
  total = total or {}
  local data = #tensors > 0 and Tensor.read_all(tensors)
  for _, part in ipairs(parts) do
    at = add_part(total, part, data, at)
  end
  return total
end

local function mean(sum, count)
  return sum and count > 0 and sum / count or nil
end

--- TRL's metrics of a batch; those of nothing are left out. logits/chosen and logits/rejected are
--- means over the answers' tokens and the vocabulary, mean_token_accuracy is that of the chosen
--- answers.
---@param total table  of total(), this process's
---@return table<string, number>
function M.metrics(total)
  local metrics = {}
  total = ranks.sum(total)
  for name, sum in pairs(total.means) do
    metrics[name] = sum / total.rows
  end
  for _, side in ipairs(SIDES) do
    for _, name in ipairs({ "logps/" .. side, "rewards/" .. side }) do
      metrics[name] = total[side] and total[name] / total[side]
    end
    metrics["logits/" .. side] = mean(total["logits/" .. side], total["tokens/" .. side])
  end
  metrics.mean_token_accuracy = mean(total.correct, total["tokens/chosen"])
  local chosen, rejected = metrics["rewards/chosen"], metrics["rewards/rejected"]
  metrics["rewards/margins"] = chosen and rejected and chosen - rejected
  metrics["rewards/accuracies"] = total.right and total.right / total.rows
  metrics.entropy = total.tokens and total.entropy / math.max(total.tokens, 1)
  return metrics
end

return M
