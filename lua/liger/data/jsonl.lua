-- Reads JSON lines: one object a line, and what is wrong by file, line and column.
local cjson = require("cjson").new()
local column = require("liger.data.column")
local files = require("liger.file")
local json = require("liger.data.json")

cjson.decode_invalid_numbers(false)

local M = {}

local BOM = "\239\187\191"

local function fail(path, line, text, at)
  local place = at and ("%s:%d:%d"):format(path, line, at) or ("%s:%d"):format(path, line)
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
  local wanted, found, at = message:match("^Expected (.-) but found (.-) at character (%d+)")
  if wanted then
    found = found:gsub("^T_", "")
    local text = ("found %s, wanted %s"):format(words[found] or found, words[wanted] or wanted)
    fail(path, line, text, at + shift)
  end
  at = message:match("at character (%d+)")
  fail(path, line, "no JSON: " .. message, at and at + shift)
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
    local got = row == cjson.null and "null" or "a " .. type(row)
    fail(path, number, ("the line is %s, wanted an object"):format(got))
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

--- The same; a file without rows is refused.
---@param path string
---@return table[]
function M.rows(path)
  local rows = M.read(path)
  if #rows == 0 then
    error(("%s: there are no rows, wanted one object a line"):format(path), 0)
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
  local name = row.prompt ~= nil and "prompt" or "messages"
  local prompt = row[name]
  if prompt == nil then
    column.lacks(path, row, { "prompt", "messages" }, "one of them")
  elseif name == "prompt" then
    column.check(path, row, name, "string", "table")
  else
    column.check(path, row, name, "table")
    prompt = without_answer(prompt)
  end
  if #prompt == 0 then
    column.fail(path, row, "column `%s` is empty, wanted a prompt", name)
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
  return list
end

return M
