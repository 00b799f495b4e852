-- Reads JSON lines: one object a line, and what is wrong by file, line and column.
local cjson = require("cjson").new()
local files = require("liger.file")
local json = require("liger.data.json")

cjson.decode_invalid_numbers(false)

local M = {}

local BOM = "\239\187\191"

local function fail(path, line, text, column)
  local place = column and ("%s:%d:%d"):format(path, line, column) or ("%s:%d"):format(path, line)
  error(("%s: %s"):format(place, text), 0)
end

-- cjson's words for tokens, in ours.
local words = {
  OBJ_BEGIN = "{",
  OBJ_END = "}",
  ARR_BEGIN = "[",
  ARR_END = "]",
  STRING = "a string",
  NUMBER = "a number",
  BOOLEAN = "a boolean",
  NULL = "null",
  COLON = ":",
  COMMA = ",",
  END = "the end of the line",
  value = "a value",
  colon = ":",
  ["the end"] = "the end of the line",
  ["comma or object end"] = ", or }",
  ["comma or array end"] = ", or ]",
  ["object key string"] = "a key in quotes",
  ["invalid token"] = "what is no JSON",
  ["invalid escape code"] = "a wrong escape",
  ["unexpected end of string"] = "a string that does not end",
}

-- cjson says "Expected X but found Y at character N".
local function fail_parse(path, line, message, shift)
  local wanted, found, column = message:match("^Expected (.-) but found (.-) at character (%d+)")
  if wanted then
    found = found:gsub("^T_", "")
    local text = ("found %s, wanted %s"):format(words[found] or found, words[wanted] or wanted)
    fail(path, line, text, column + shift)
  end
  column = message:match("at character (%d+)")
  fail(path, line, "no JSON: " .. message, column and column + shift)
end

-- Columns that are null are left out, as if they were not there; a null in a list stays.
local function drop_null(value)
  for key, item in pairs(value) do
    if type(item) == "table" then
      drop_null(item)
    elseif item == cjson.null and type(key) == "string" then
      value[key] = nil
    end
  end
end

local function parse(path, number, text, shift)
  local first = text:match("%S")
  if first == "[" then
    fail(path, number, "a list starts here, wanted one object a line")
  end
  local ok, row = pcall(cjson.decode, text)
  if not ok then
    fail_parse(path, number, row, shift)
  elseif first ~= "{" then
    fail(path, number, ("the line is a %s, wanted an object"):format(type(row)))
  end
  drop_null(row)
  row._line = number
  return row
end

--- The rows of a JSON lines file. Empty lines are skipped, a byte order mark and CRLF are taken
--- off.
---@param path string
---@return table[] rows  each with its line's number in `_line`
function M.read(path)
  local file, message = io.open(path, "rb")
  if not file then
    error(message, 0)
  end
  local rows, number = {}, 0
  while true do
    local text, why = file:read("*l")
    if not text then
      file:close()
      if why then
        error(("%s: %s"):format(path, why), 0)
      end
      break
    end
    number = number + 1
    local shift = 0
    if number == 1 and text:sub(1, 3) == BOM then
      text, shift = text:sub(4), 3
    elseif number == 1 and (text:sub(1, 2) == "\255\254" or text:sub(1, 2) == "\254\255") then
      fail(path, 1, "the file is UTF-16, wanted UTF-8")
    end
    if text:find("%S") then
      rows[#rows + 1] = parse(path, number, text:gsub("\r$", ""), shift)
    end
  end
  return rows
end

--- Writes rows as JSON lines, without their `_line`.
---@param path string
---@param rows table[]
function M.write(path, rows)
  local lines = {}
  for i, row in ipairs(rows) do
    local copy = {}
    for key, value in pairs(row) do
      copy[key] = value
    end
    copy._line = nil
    lines[i] = json.encode(copy) .. "\n"
  end
  files.write(path, table.concat(lines))
end

-- ---- prompts ----

--- Refuses what is no list of { role, content }.
---@param path string
---@param line integer
---@param name string  of the column
---@param messages table[]
function M.check_messages(path, line, name, messages)
  if #messages == 0 then
    fail(path, line, name .. " is empty")
  end
  for i, message in ipairs(messages) do
    if type(message) ~= "table" or type(message.role) ~= "string" then
      fail(path, line, ("%s[%d] has no role, wanted { role, content }"):format(name, i))
    elseif type(message.content) ~= "string" and not message.tool_calls then
      local kind = message.content == nil and "missing" or "a " .. type(message.content)
      fail(path, line, ("%s[%d].content is %s, wanted a string"):format(name, i, kind))
    end
  end
end

local function columns(row)
  local names = {}
  for name in pairs(row) do
    if name ~= "_line" then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  return #names > 0 and table.concat(names, ", ") or "none"
end

-- A conversation up to the answer.
local function without_answer(messages)
  local list, n = {}, #messages
  if n > 0 and messages[n].role == "assistant" then
    n = n - 1
  end
  for i = 1, n do
    list[i] = messages[i]
  end
  return list
end

local function prompt_of(row, path)
  local prompt, name = row.prompt, "prompt"
  if prompt == nil then
    prompt, name = row.messages, "messages"
    if type(prompt) == "string" then
      fail(path, row._line, "messages is a string, wanted a list of { role, content }")
    end
  end
  if prompt == nil then
    fail(path, row._line, ("no prompt and no messages, the columns are %s"):format(columns(row)))
  elseif type(prompt) == "table" then
    M.check_messages(path, row._line, name, prompt)
    prompt = name == "messages" and without_answer(prompt) or prompt
  elseif type(prompt) ~= "string" then
    local wanted = "prompt is a %s, wanted a string or a list of messages"
    fail(path, row._line, wanted:format(type(prompt)))
  end
  if #prompt == 0 then
    fail(path, row._line, name .. " is empty")
  end
  return prompt
end

--- Rows with a `prompt` each: the row's own (a string or a list of messages), or its `messages`
--- without the answer at the end. Other columns stay.
---@param rows table[]  from M.read
---@param path string   for messages
---@return table[]
function M.prompts(rows, path)
  local list = {}
  for i, row in ipairs(rows) do
    local copy = {}
    for key, value in pairs(row) do
      copy[key] = value
    end
    copy._line = row._line or i
    copy.prompt = prompt_of(copy, path)
    list[i] = copy
  end
  if #list == 0 then
    error(("%s: no rows"):format(path), 0)
  end
  return list
end

return M
