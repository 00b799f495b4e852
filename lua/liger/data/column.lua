-- What is wrong with a row of a data file, always as FILE:LINE: column `NAME` is GOT, wanted WANT.
local M = {}

local KINDS = {
  string = "a string", number = "a number", boolean = "true or false",
  table = "a list of messages",
}
local GOT = { string = "a string", number = "a number", boolean = "a boolean", table = "a list" }

--- A number of things in words: "1 row", "2 rows".
---@param n integer
---@param thing string
---@return string
function M.count(n, thing)
  return ("%d %s%s"):format(n, thing, n == 1 and "" or "s")
end

--- Raises what is wrong with a row, without a line of Lua.
---@param path string
---@param row table    with _line
---@param text string  printf-style, with `...`
function M.fail(path, row, text, ...)
  error(("%s:%d: %s"):format(path, row._line or 0, text:format(...)), 0)
end

--- That a column, or a part of one, has not the type it should have.
---@param name string
---@param value any
---@param wanted string
---@return string
function M.is_wrong(name, value, wanted)
  local got = value == nil and "missing" or GOT[type(value)] or "null"
  return ("column `%s` is %s, wanted %s"):format(name, got, wanted)
end

--- What is wrong with a column that must be one of the types `...` (of a list only that it is one).
---@param row table
---@param name string
---@param ... "string"|"number"|"boolean"|"table"
---@return string|nil
function M.problem(row, name, ...)
  local value, kinds = row[name], {}
  for i, kind in ipairs({ ... }) do
    if type(value) == kind then
      return nil
    end
    kinds[i] = KINDS[kind]
  end
  return M.is_wrong(name, value, table.concat(kinds, " or "))
end

-- What is wrong with a list of { role, content }.
local function problem_of_messages(name, messages)
  if #messages == 0 and next(messages) ~= nil then
    return ("column `%s` is an object, wanted a list of messages"):format(name)
  elseif #messages == 0 then
    return ("column `%s` is empty, wanted at least one message"):format(name)
  end
  for i, message in ipairs(messages) do
    local place = ("%s[%d]"):format(name, i)
    if type(message) ~= "table" then
      return M.is_wrong(place, message, "{ role, content }")
    elseif type(message.role) ~= "string" then
      return M.is_wrong(place .. ".role", message.role, "a string")
    elseif type(message.content) ~= "string" and not message.tool_calls then
      return M.is_wrong(place .. ".content", message.content, "a string")
    end
  end
end

--- Refuses a column that is not one of the types `...` ("string", "boolean", "table": a list of
--- messages, each with role and content).
---@param path string
---@param row table
---@param name string
function M.check(path, row, name, ...)
  local problem = M.problem(row, name, ...)
  if not problem and type(row[name]) == "table" then
    problem = problem_of_messages(name, row[name])
  end
  if problem then
    M.fail(path, row, "%s", problem)
  end
end

--- Refuses a row that has none of some columns.
---@param path string
---@param row table
---@param names string[]
---@param wanted string
function M.lacks(path, row, names, wanted)
  local there = {}
  for name in pairs(row) do
    there[#there + 1] = name ~= "_line" and name or nil
  end
  table.sort(there)
  local last = #names > 1 and ("` and `%s"):format(names[#names]) or ""
  M.fail(path, row, "columns `%s%s` are missing, wanted %s; there are: %s",
    table.concat(names, "`, `", 1, math.max(#names - 1, 1)), last, wanted,
    #there > 0 and table.concat(there, ", ") or "none")
end

return M
