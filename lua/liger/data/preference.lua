-- Rows of a JSONL file for the preference methods, in TRL's formats: `prompt`, `chosen` and
-- `rejected`, where without a prompt, or beside chats with one in text, the answers' common
-- beginning is it; `prompt`, `completion` and `label`. Each is a text or a list of messages.
local column = require("liger.data.column")
local jsonl = require("liger.data.jsonl")
local prompts = require("liger.data.prompts")
local sampler = require("liger.data.sampler")

local M = {}

-- ---- the prompt that both answers begin with ----

-- Bytes that two texts share at the beginning, less a space at their end and whole characters only.
local function common_text(a, b)
  local n = 0
  while n < #a and n < #b and a:byte(n + 1) == b:byte(n + 1) do
    n = n + 1
  end
  -- A continuation byte of UTF-8 belongs to the character before.
  while n > 0 and a:byte(n + 1) and a:byte(n + 1) >= 0x80 and a:byte(n + 1) < 0xC0 do
    n = n - 1
  end
  return a:sub(n, n) == " " and n - 1 or n
end

local function is_same(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then
    return a == b
  end
  for _, pair in ipairs({ { a, b }, { b, a } }) do
    for key, value in pairs(pair[1]) do
      if not is_same(value, pair[2][key]) then
        return false
      end
    end
  end
  return true
end

local function common_messages(a, b)
  local n = 0
  while n < #a and n < #b and is_same(a[n + 1], b[n + 1]) do
    n = n + 1
  end
  return n
end

-- Entries first to last (default: the end) of a text or a list.
local function part(value, first, last)
  if type(value) == "string" then
    return value:sub(first, last)
  end
  local list = {}
  for i = first, math.min(last or #value, #value) do
    list[#list + 1] = value[i]
  end
  return list
end

local function extract_prompt(path, row)
  local a, b = row.chosen, row.rejected
  local n = type(a) == "string" and common_text(a, b) or common_messages(a, b)
  if n == 0 then
    local wanted = type(a) == "string" and "a string" or "a list of messages"
    column.fail(path, row, "%s, or answers with the same beginning",
      column.is_wrong("prompt", row.prompt, wanted))
  elseif n == #a or n == #b then
    column.fail(
      path, row, "column `%s` is all prompt, wanted an answer behind the common beginning",
      n == #a and "chosen" or "rejected"
    )
  end
  row.prompt, row.chosen, row.rejected = part(a, 1, n), part(a, n + 1), part(b, n + 1)
end

-- ---- rows ----

-- The ids of prompt and answers, cut on the right; nil: nothing of the answers is left.
local function encode(path, tokenizer, row, columns, limits)
  row.ids = prompts.encode_row(path, row, tokenizer, row.prompt, true)
  if #row.ids == 0 then
    column.fail(path, row, "column `prompt` is empty, wanted at least one token")
  end
  local y, longest = { ids = row.ids, row = row }, 0
  for _, name in ipairs(columns) do
    local ids = prompts.completion_ids(tokenizer, path, row, name)
    for i = #ids, math.max((limits.max_length or math.huge) - #row.ids, 0) + 1, -1 do
      ids[i] = nil
    end
    y[name], longest = ids, math.max(longest, #ids)
  end
  local context = limits.context or math.huge
  if #row.ids + longest > context then
    column.fail(path, row, "the row has %d tokens, wanted at most %d; max_length cuts it",
      #row.ids + longest, context)
  end
  return longest > 0 and y or nil
end

local function pair_of(path, tokenizer, row, limits)
  for _, name in ipairs({ "chosen", "rejected" }) do
    column.check(path, row, name, "string", "table")
  end
  if type(row.chosen) ~= type(row.rejected) then
    column.check(path, row, "rejected", type(row.chosen))
  elseif row.prompt == nil or type(row.prompt) == "string" and type(row.chosen) == "table" then
    extract_prompt(path, row)
  end
  column.check(path, row, "prompt", "string", "table")
  return encode(path, tokenizer, row, { "chosen", "rejected" }, limits)
end

local function single_of(path, tokenizer, row, limits)
  column.check(path, row, "prompt", "string", "table")
  column.check(path, row, "completion", "string", "table")
  column.check(path, row, "label", "boolean")
  local y = encode(path, tokenizer, row, { "completion" }, limits)
  if y then
    y.label = row.label
  end
  return y
end

local function read(path, tokenizer, limits, of)
  local list = {}
  for _, row in ipairs(jsonl.rows(path)) do
    list[#list + 1] = of(path, tokenizer, row, limits)
  end
  return list
end

--- Pairs of answers.
---@param path string
---@param tokenizer liger.Tokenizer
---@param limits { max_length?: integer, context?: integer }  tokens of prompt and answer: longer
---   ones are cut on the right; what the model takes: a longer row is refused
---@return liger.PreferenceRow[]  those of which an answer is left
function M.pairs(path, tokenizer, limits)
  return read(path, tokenizer, limits, pair_of)
end

--- Answers with a label, or pairs (unpair() makes answers of them).
---@param path string
---@param tokenizer liger.Tokenizer
---@param limits { max_length?: integer, context?: integer }
---@return liger.PreferenceRow[]
function M.labelled(path, tokenizer, limits)
  return read(path, tokenizer, limits, function(file, tok, row, l)
    return (row.chosen ~= nil and pair_of or single_of)(file, tok, row, l)
  end)
end

--- Each pair as two answers with their labels; what is no pair stays.
---@param rows liger.PreferenceRow[]
---@return liger.PreferenceRow[]
function M.unpair(rows)
  local list = {}
  for _, row in ipairs(rows) do
    if row.chosen then
      list[#list + 1] = { ids = row.ids, completion = row.chosen, label = true, row = row.row }
      list[#list + 1] = { ids = row.ids, completion = row.rejected, label = false, row = row.row }
    else
      list[#list + 1] = row
    end
  end
  return list
end

--- Gives each row an answer to another prompt as `mismatched`, cut to max_length. KTO's KL is
--- estimated from them.
---@param rows liger.PreferenceRow[]
---@param pool liger.PreferenceRow[]  with completion: those whose answers are dealt out, shuffled
---@param seed integer
---@param max_length? integer
function M.mismatch(rows, pool, seed, max_length)
  local dealt = sampler.shuffle(pool, seed)
  local n = #dealt
  for i, row in ipairs(rows) do
    local step, other = 0, dealt[(i - 1) % n + 1]
    while is_same(other.ids, row.ids) do
      step = step + 1
      if step == n then
        local got = column.count(n, "row")
        error(("kto: one prompt in %s, wanted at least 2 prompts"):format(got), 0)
      end
      other = dealt[(i + step - 1) % n + 1]
    end
    row.mismatched = part(other.completion, 1, math.max((max_length or math.huge) - #row.ids, 0))
  end
end

return M
