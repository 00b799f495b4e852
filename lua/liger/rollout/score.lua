-- Scores given sequences: log-probability and entropy of every token after the first.
local autograd = require("liger.autograd")
local memory = require("liger.memory")
local pack = require("liger.nn.pack")

local M = {}

local BATCH_TOKENS = 4096 -- tokens a forward takes in

local function flush(model, group, options)
  local scope = memory.open_scope()
  local sequences = {}
  for i, item in ipairs(group) do
    sequences[i] = item.ids
  end
  local logp, entropy = model:logprob(pack.sequences(sequences), options)
  local logp_data, entropy_data, at = logp:read(), entropy:read(), 0
  for _, item in ipairs(group) do
    for j = 1, #item.ids - 1 do
      item.result.logp[j] = tonumber(logp_data[at + j - 1])
      item.result.entropy[j] = tonumber(entropy_data[at + j - 1])
    end
    at = at + #item.ids
  end
  memory.close_scope(scope)
end

--- Log-probabilities and entropies, in nats, of the second to the last token of each sequence.
---@param model liger.Decoder
---@param sequences integer[][]
---@param options? table  temperature
---@return { logp: number[], entropy: number[] }[]
function M.sequences(model, sequences, options)
  return autograd.no_grad(function()
    local results, group, tokens = {}, {}, 0
    for i, ids in ipairs(sequences) do
      results[i] = { logp = {}, entropy = {} }
      if tokens > 0 and tokens + #ids > BATCH_TOKENS then
        flush(model, group, options)
        group, tokens = {}, 0
      end
      group[#group + 1] = { ids = ids, result = results[i] }
      tokens = tokens + #ids
    end
    if tokens > 0 then
      flush(model, group, options)
    end
    return results
  end)
end

return M
