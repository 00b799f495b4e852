-- Packing: sequences of different lengths laid end to end, with the positions, boundaries and
-- targets that the model needs.
local lib = require("liger.ffi")
local ranks = require("liger.ranks")
local Tensor = require("liger.tensor")

local M = {}

---@class liger.Pack
---@field ids liger.Tensor         [N] i32
---@field position liger.Tensor    [N] i32, from 0 in each sequence
---@field cu_seqlens liger.Tensor  [S+1] i32
---@field target liger.Tensor      [N] i32: the next id, -100 where nothing is predicted
---@field max_length integer       the longest sequence
---@field num_tokens integer       N

local function new_pack(num_tokens, num_sequences)
  return {
    ids = Tensor.stage({ num_tokens }, "i32"),
    position = Tensor.stage({ num_tokens }, "i32"),
    target = Tensor.stage({ num_tokens }, "i32"),
    cu_seqlens = Tensor.stage({ num_sequences + 1 }, "i32"),
    max_length = 1,
    num_tokens = num_tokens,
  }
end

--- Packs whole sequences; every token but the last of each predicts the next.
---@param sequences integer[][]
---@return liger.Pack
function M.sequences(sequences)
  local N = 0
  for _, s in ipairs(sequences) do
    N = N + #s
  end
  local p = new_pack(N, #sequences)
  local id, position, target, start =
    p.ids:data(), p.position:data(), p.target:data(), p.cu_seqlens:data()
  local at = 0
  start[0] = 0
  for i, s in ipairs(sequences) do
    for j = 1, #s do
      id[at], position[at], target[at] = s[j], j - 1, s[j + 1] or -100
      at = at + 1
    end
    start[i] = at
    p.max_length = math.max(p.max_length, #s)
  end
  return p
end

--- Packs prompts (`ids`) with their completions; only completion ids are targets, and the last of
--- them is no input, since nothing follows.
---@param samples { ids: integer[], completion: integer[] }[]
---@return liger.Pack pack  with, for the K completion tokens: rows [K] i32 (where each is
---   predicted), sequence [K] i32 (its sample, from
---   0), completion_cu [S+1] i32, num_completion
function M.completions(samples)
  local N, K = 0, 0
  for i, s in ipairs(samples) do
    if #s.ids == 0 then
      lib.raise(("pack: sample %d has no prompt, wanted at least one token"):format(i))
    end
    N = N + #s.ids + math.max(#s.completion - 1, 0)
    K = K + #s.completion
  end
  local p = new_pack(N, #samples)
  p.rows, p.sequence = Tensor.stage({ K }, "i32"), Tensor.stage({ K }, "i32")
  p.completion_cu = Tensor.stage({ #samples + 1 }, "i32")
  p.num_completion = K
  local id, position, target, start =
    p.ids:data(), p.position:data(), p.target:data(), p.cu_seqlens:data()
  local rows, sequence, completion_start = p.rows:data(), p.sequence:data(), p.completion_cu:data()
  local at, k = 0, 0
  start[0], completion_start[0] = 0, 0
  for i, s in ipairs(samples) do
    local prompt, completion = s.ids, s.completion
    local P = #prompt
    local length = P + math.max(#completion - 1, 0)
    for j = 1, length do
      id[at] = j <= P and prompt[j] or completion[j - P]
      position[at] = j - 1
      local next_id = j >= P and completion[j - P + 1]
      target[at] = next_id or -100
      if next_id then
        rows[k], sequence[k] = at, i - 1
        k = k + 1
      end
      at = at + 1
    end
    start[i], completion_start[i] = at, k
    p.max_length = math.max(p.max_length, length)
  end
  return p
end

--- Cuts a batch into runs of at most max_tokens tokens (one sample at least), in order. Of several
--- processes each cuts its own share, which may be empty.
---@param samples { ids: integer[], completion: integer[] }[]
---@param max_tokens integer  0: no limit
---@param count? fun(sample: table): integer  its tokens, where it has another form
---@return table[][]
function M.split(samples, max_tokens, count)
  local parts, part, tokens = {}, {}, 0
  for _, s in ipairs((ranks.share(samples))) do
    local n = count and count(s) or #s.ids + #s.completion
    if max_tokens > 0 and #part > 0 and tokens + n > max_tokens then
      parts[#parts + 1] = part
      part, tokens = {}, 0
    end
    part[#part + 1] = s
    tokens = tokens + n
  end
  if #part > 0 then
    parts[#parts + 1] = part
  end
  return parts
end

--- The first and the second half of a vector: of pairs, the chosen and the rejected ones.
---@param x liger.Tensor  [2P]
---@return liger.Tensor   [P]
---@return liger.Tensor   [P]
function M.halves(x)
  local P = x:size(1) / 2
  return x:narrow(1, 1, P), x:narrow(1, P + 1, P)
end

return M
