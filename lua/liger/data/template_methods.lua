-- Methods of strings, dictionaries and lists in chat templates, and the checks that all of a
-- template's functions share. Every function takes the scope first, which knows the line for
-- errors.
local pyvalue = require("liger.data.pyvalue")

local M = {}

local kind, str, list = pyvalue.kind, pyvalue.str, pyvalue.list

--- Where a scope keeps what no template can name: the line being rendered.
M.STATE = {}

--- Raises `message` with the template's line.
function M.fail(scope, message)
  error(("chat template, line %d: %s"):format(scope[M.STATE].line, message), 0)
end

local fail = M.fail

-- Kinds as Python's messages spell them.
local python_names =
  { string = "str", none = "None", dict = "dict object", number = "int", boolean = "bool" }

local function type_name(value)
  return python_names[kind(value)] or kind(value)
end

local function want_defined(scope, value)
  if kind(value) == "undefined" then
    fail(scope, value.message)
  end
  return value
end

local function want_string(scope, value, what)
  want_defined(scope, value)
  if kind(value) ~= "string" then
    fail(scope, ("%s is a %s, wanted a string"):format(what, kind(value)))
  end
  return value
end

local function optional(value)
  if value == nil or kind(value) == "none" then
    return nil
  end
  return value
end

local function want_items(scope, value)
  local items = pyvalue.iterate(value)
  if not items then
    fail(scope, ("'%s' object is not iterable"):format(type_name(value)))
  end
  return items
end

-- ---- methods ----

local strings, dicts, lists = {}, {}, {}

function strings.strip(_, s, args)
  return pyvalue.strip(s, optional(args[1]), true, true)
end

function strings.lstrip(_, s, args)
  return pyvalue.strip(s, optional(args[1]), true, false)
end

function strings.rstrip(_, s, args)
  return pyvalue.strip(s, optional(args[1]), false, true)
end

local function split(scope, s, args, named)
  local separator = optional(args[1] or named.sep)
  local limit = optional(args[2] or named.maxsplit) or -1
  local out, at = list(), 1
  if separator == nil then
    at = s:find("%S") or #s + 1
    while at <= #s and #out ~= limit do
      local from, to = s:find("%s+", at)
      out[#out + 1] = s:sub(at, (from or #s + 1) - 1)
      at = (to or #s) + 1
    end
    if at <= #s then
      out[#out + 1] = s:sub(at)
    end
    return out
  elseif want_string(scope, separator, "a separator") == "" then
    fail(scope, "empty separator")
  end
  while #out ~= limit do
    local from, to = s:find(separator, at, true)
    if not from then
      break
    end
    out[#out + 1] = s:sub(at, from - 1)
    at = to + 1
  end
  out[#out + 1] = s:sub(at)
  return out
end

strings.split = split

function strings.rsplit(scope, s, args, named)
  local limit = optional(args[2] or named.maxsplit)
  local parts = split(scope, s, { args[1] }, { sep = named.sep })
  if not limit or #parts <= limit + 1 then
    return parts
  end
  local cut = #parts - limit
  local out = list({ table.concat(parts, args[1] or named.sep, 1, cut) })
  for i = cut + 1, #parts do
    out[#out + 1] = parts[i]
  end
  return out
end

function strings.splitlines(_, s)
  local out = list()
  for line in (s:find("\n$") and s or s .. "\n"):gmatch("(.-)\r?\n") do
    out[#out + 1] = line
  end
  return s == "" and list() or out
end

-- startswith and endswith take one text or a list of them.
local function any_affix(scope, affixes, matches)
  for _, affix in ipairs(kind(affixes) == "list" and affixes or { affixes }) do
    if matches(want_string(scope, affix, "an affix")) then
      return true
    end
  end
  return false
end

function strings.startswith(scope, s, args)
  return any_affix(scope, args[1], function(affix)
    return s:sub(1, #affix) == affix
  end)
end

function strings.endswith(scope, s, args)
  return any_affix(scope, args[1], function(affix)
    return affix == "" or s:sub(-#affix) == affix
  end)
end

local function replace(scope, s, args)
  local old = want_string(scope, args[1], "the old text")
  local new = want_string(scope, args[2], "the new text")
  local limit = optional(args[3])
  if old == "" then
    fail(scope, "replace: the old text is empty, wanted some")
  end
  local out, at, n = {}, 1, 0
  while n ~= limit do
    local from, to = s:find(old, at, true)
    if not from then
      break
    end
    out[#out + 1] = s:sub(at, from - 1) .. new
    at, n = to + 1, n + 1
  end
  return table.concat(out) .. s:sub(at)
end

strings.replace = replace

function strings.upper(_, s)
  return s:upper()
end

function strings.lower(_, s)
  return s:lower()
end

function strings.capitalize(_, s)
  return s:sub(1, 1):upper() .. s:sub(2):lower()
end

function strings.title(_, s)
  return (s:lower():gsub("%a[%a\128-\255]*", function(word)
    return word:sub(1, 1):upper() .. word:sub(2)
  end))
end

function strings.join(scope, s, args)
  local out = {}
  for i, item in ipairs(want_items(scope, args[1])) do
    out[i] = want_string(scope, item, "a joined item")
  end
  return table.concat(out, s)
end

function strings.find(scope, s, args)
  local from = s:find(want_string(scope, args[1], "a text to find"), 1, true)
  return from and pyvalue.length(s:sub(1, from - 1)) or -1
end

function strings.count(scope, s, args)
  return #split(scope, s, args, {}) - 1
end

function strings.isdigit(_, s)
  return s:find("^%d+$") ~= nil
end

function strings.isalpha(_, s)
  return s:find("^[%a\128-\255]+$") ~= nil
end

function strings.isspace(_, s)
  return s ~= "" and pyvalue.strip(s, nil, true, false) == ""
end

function dicts.items(_, d)
  return pyvalue.items(d)
end

function dicts.keys(_, d)
  return list(pyvalue.keys(d))
end

function dicts.values(_, d)
  local out = list()
  for i, key in ipairs(pyvalue.keys(d)) do
    out[i] = d[key]
  end
  return out
end

function dicts.get(_, d, args)
  local value = d[args[1]]
  if value == nil then
    value = args[2]
  end
  if value == nil then
    return pyvalue.none
  end
  return value
end

function lists.index(scope, l, args)
  for i, item in ipairs(l) do
    if pyvalue.equals(item, args[1]) then
      return i - 1
    end
  end
  fail(scope, ("%s is not in list"):format(str(args[1])))
end

function lists.count(_, l, args)
  local n = 0
  for _, item in ipairs(l) do
    n = n + (pyvalue.equals(item, args[1]) and 1 or 0)
  end
  return n
end

M.type_name, M.optional = type_name, optional
M.want_defined, M.want_string, M.want_items = want_defined, want_string, want_items
M.strings, M.lists = strings, lists

--- The methods of a kind of value, by name.
M.by_kind = { string = strings, dict = dicts, list = lists }

return M
