-- How well a model predicts held-out samples.
local autograd = require("liger.autograd")
local memory = require("liger.memory")
local pack = require("liger.nn.pack")
local sft = require("liger.loss.sft")

local M = {}

local PART = 128 -- samples at once, then the progress is drawn

local function sums_of(model, samples, options)
  local batch = pack.completions(samples)
  local _, rows = model:cross_entropy(batch, 1, options)
  return sft.sums(batch, rows)
end

--- Mean cross entropy and share of right tokens of the samples' completions, as text; "interrupted"
--- after Ctrl-C.
---@param run liger.Run        its config: micro_tokens
---@param model liger.Decoder
---@param samples { ids: integer[], completion: integer[] }[]
---@param options? table       of fn.linear_cross_entropy
---@return string
function M.supervised(run, model, samples, options)
  local total = { loss = 0, correct = 0, tokens = 0 }
  for rows in run:parts(samples, PART, "held-out") do
    local sums = {}
    for i, part in ipairs(pack.split(rows, run.config.micro_tokens)) do
      sums[i] = autograd.no_grad(memory.scope, sums_of, model, part, options)
    end
    for key, value in pairs(sft.total(sums)) do
      total[key] = (total[key] or 0) + value
    end
  end
  if run.should_stop() then
    return "interrupted"
  end
  local tokens = math.max(total.tokens, 1)
  return ("%.4f loss, %.3f token accuracy"):format(total.loss / tokens, total.correct / tokens)
end

return M
