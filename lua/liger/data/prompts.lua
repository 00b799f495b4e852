-- Rows of a JSONL file as prompts and as supervised samples, in TRL's formats.
local column = require("liger.data.column")
local jsonl = require("liger.data.jsonl")
local sampler = require("liger.data.sampler")

local M = {}

--- Ids and text of a text or a chat. A rendered chat already has its special tokens; plain text
--- gets the tokenizer's.
---@param tokenizer liger.Tokenizer
---@param text_or_messages string|table[]
---@param generation boolean  the chat ends where the assistant begins
---@return integer[] ids
---@return string text
function M.encode(tokenizer, text_or_messages, generation)
  if type(text_or_messages) == "table" then
    local text = tokenizer:apply_chat_template(
      text_or_messages, { add_generation_prompt = generation }
    )
    return tokenizer:encode(text), text
  end
  return tokenizer:encode(text_or_messages, { special = true }), text_or_messages
end

--- The same of a row of a file; a chat for a tokenizer without a template is refused.
---@param path string
---@param row table
---@param tokenizer liger.Tokenizer
---@param text_or_messages string|table[]
---@param generation boolean
---@return integer[] ids
function M.encode_row(path, row, tokenizer, text_or_messages, generation)
  if type(text_or_messages) == "table" and not tokenizer.chat_template then
    column.fail(path, row, "the row is a chat, wanted texts: the tokenizer has no chat template")
  end
  return (M.encode(tokenizer, text_or_messages, generation))
end

--- What is wrong with a prompt that leaves no room for its completion; nil where it fits.
---@param ids integer[]
---@param longest integer  tokens of a completion
---@param context integer  tokens that both must fit into
---@return string|nil
function M.too_long(ids, longest, context)
  if #ids + longest > context then
    local text = "column `prompt` has %s and max_completion_length is %d, wanted at most "
      .. "%d together"
    return text:format(column.count(#ids, "token"), longest, context)
  end
end

--- Prompts of a file: each row with `prompt` (text or messages) or `messages`, its other columns
--- kept, and `ids`.
---@param path string
---@param tokenizer liger.Tokenizer
---@param limits? { check?: fun(row: table): string|nil, context?: integer,
---   max_completion_length?: integer }  check says what is wrong with a row; prompt and completion
---   must fit into context tokens
---@return table[]
function M.load(path, tokenizer, limits)
  local rows = jsonl.prompts(jsonl.rows(path), path)
  local check, context = limits and limits.check, limits and limits.context or math.huge
  local longest = limits and limits.max_completion_length or 0
  for _, row in ipairs(rows) do
    row.ids = M.encode_row(path, row, tokenizer, row.prompt, true)
    local problem = check and check(row)
    if #row.ids == 0 then
      problem = "column `prompt` is empty, wanted at least one token"
    else
      problem = M.too_long(row.ids, longest, context) or problem
    end
    if problem then
      column.fail(path, row, "%s", problem)
    end
  end
  return rows
end

--- The ids of a row's answer behind `row.ids`, its prompt's; an answer in text ends with the eos
--- id.
---@param tokenizer liger.Tokenizer
---@param path string
---@param row table    with prompt and ids
---@param name string  of the answer's column, of the prompt's type
---@return integer[]
function M.completion_ids(tokenizer, path, row, name)
  local prompt, completion = row.prompt, row[name]
  column.check(path, row, name, type(prompt))
  if type(completion) == "table" then
    -- The chat with its answer, less the chat up to the answer's beginning.
    local all = {}
    for _, m in ipairs(prompt) do
      all[#all + 1] = m
    end
    for _, m in ipairs(completion) do
      all[#all + 1] = m
    end
    local whole = M.encode_row(path, row, tokenizer, all, false)
    local ids = {}
    for i, id in ipairs(row.ids) do
      if whole[i] ~= id then
        column.fail(
          path, row,
          "the chat template changes the prompt when column `%s` follows, from token %d on", name, i
        )
      end
    end
    for i = #row.ids + 1, #whole do
      ids[#ids + 1] = whole[i]
    end
    return ids
  end
  local ids = tokenizer:encode(completion)
  if tokenizer.eos_id and ids[#ids] ~= tokenizer.eos_id then
    ids[#ids + 1] = tokenizer.eos_id
  end
  return ids
end

-- A chat whose last message is the assistant's as prompt and completion.
local function split_answer(path, row)
  column.check(path, row, "messages", "table")
  local prompt, answer = {}, row.messages[#row.messages]
  for i = 1, #row.messages - 1 do
    prompt[i] = row.messages[i]
  end
  if answer.role ~= "assistant" or #prompt == 0 then
    column.fail(
      path, row,
      "column `messages` ends with a %s after %s, wanted an answer of the assistant",
      answer.role, column.count(#prompt, "other")
    )
  end
  row.prompt, row.completion = prompt, { answer }
end

--- Supervised samples: `text` and `messages` learn every token but the first, `prompt` +
--- `completion` the completion only.
---@param path string
---@param tokenizer liger.Tokenizer
---@param max_length integer  longer samples are cut on the right
---@param context? integer    tokens that the model takes; a sample longer than that is refused
---@param answers? boolean    of `messages` only the last one is learnt, an answer
---@return { ids: integer[], completion: integer[], row: table }[] samples  those with nothing to
---   learn left out
function M.supervised(path, tokenizer, max_length, context, answers)
  local samples = {}
  for _, row in ipairs(jsonl.rows(path)) do
    local prompt, completion
    if answers and row.messages ~= nil and row.prompt == nil then
      split_answer(path, row)
    end
    local has_text = row.text ~= nil or row.messages ~= nil
    local has_prompt, has_completion = row.prompt ~= nil, row.completion ~= nil
    if has_prompt and has_completion or not has_text and (has_prompt or has_completion) then
      column.check(path, row, "prompt", "string", "table")
      row.ids = M.encode_row(path, row, tokenizer, row.prompt, true)
      prompt, completion = row.ids, M.completion_ids(tokenizer, path, row, "completion")
    elseif has_text then
      column.check(
        path, row, row.text ~= nil and "text" or "messages", row.text ~= nil and "string" or "table"
      )
      local ids = M.encode_row(path, row, tokenizer, row.text or row.messages, false)
      if row.text and tokenizer.eos_id and ids[#ids] ~= tokenizer.eos_id then
        ids[#ids + 1] = tokenizer.eos_id
      end
      prompt, completion = { ids[1] }, {}
      for i = 2, #ids do
        completion[i - 1] = ids[i]
      end
    else
      column.lacks(
        path, row, { "text", "messages", "prompt", "completion" },
        "a text, messages, or a prompt and a completion"
      )
    end
    local cut = #prompt + #completion > max_length
    for i = #completion, math.max(max_length - #prompt, 0) + 1, -1 do
      completion[i] = nil
    end
    if #prompt > 0 and #completion > 0 then
      if #prompt + #completion > (context or math.huge) then
        column.fail(
          path, row, "the row has %d tokens, wanted at most %d; max_length cuts it",
          #prompt + #completion, context
        )
      end
      samples[#samples + 1] = { ids = prompt, completion = completion, row = row, cut = cut }
    end
  end
  return samples
end

--- Splits rows in two, shuffled by the seed; at least one row stays on each side.
---@param rows table[]
---@param share number  of the second part
---@param seed integer
---@param path string   the file they are of
---@return table[] rest
---@return table[] held_out
function M.split(rows, share, seed, path)
  if #rows < 2 then
    local got = column.count(#rows, "row")
    error(("%s: %s to learn from, wanted at least 2 to hold some out"):format(path, got), 0)
  end
  local shuffled, rest, held_out = sampler.shuffle(rows, seed), {}, {}
  local count = math.min(#rows - 1, math.max(1, math.floor(#rows * share)))
  for i, row in ipairs(shuffled) do
    local list = i <= count and held_out or rest
    list[#list + 1] = row
  end
  return rest, held_out
end

return M
