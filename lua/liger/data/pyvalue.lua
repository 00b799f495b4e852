-- Python's values as chat templates see them: None, undefined names, lists, dictionaries with an
-- order of keys, and how they are printed, compared and written as JSON. Strings are UTF-8 and
-- counted in characters.
local lpeg = require("lpeg")
local cjson = require("cjson")

local M = {}

--- Python's None.
M.none = cjson.null

-- ---- kinds ----

local Undefined = { kind = "undefined" }
local List = { kind = "list" }
local Namespace = { kind = "namespace" }

---@param message string  what an error says when the value is used
function M.undefined(message)
  return setmetatable({ message = message }, Undefined)
end

function M.list(items)
  return setmetatable(items or {}, List)
end

function M.namespace(items)
  return setmetatable(items or {}, Namespace)
end

--- A dictionary whose keys have the order of the list `keys`.
function M.dict(items, keys)
  return setmetatable(items or {}, { kind = "dict", keys = keys or {} })
end

--- "undefined", "none", "boolean", "number", "string", "list", "dict", "namespace" or "function". A
--- plain table is a list when it has a first entry, else a dictionary.
function M.kind(value)
  local t = type(value)
  if t == "table" then
    local meta = getmetatable(value)
    return meta and meta.kind or (value[1] ~= nil and "list" or "dict")
  elseif t == "userdata" or t == "nil" then
    return "none"
  end
  return t
end

local kind = M.kind

-- Where a table has no order of its own (Lua's have none), keys come in the order that tool
-- descriptions are written in.
local usual = {}
for i, key in ipairs({
  "type",
  "function",
  "name",
  "description",
  "parameters",
  "arguments",
  "properties",
  "required",
}) do
  usual[key] = i
end

local function usual_order(a, b)
  local i, j = usual[a] or 100, usual[b] or 100
  if i ~= j then
    return i < j
  end
  return tostring(a) < tostring(b)
end

--- The keys of a dictionary: as it was read, then others.
---@return any[]
function M.keys(dict)
  local meta = getmetatable(dict)
  local keys, seen, others = {}, {}, {}
  for _, key in ipairs(meta and meta.keys or {}) do
    if dict[key] ~= nil and not seen[key] then
      keys[#keys + 1], seen[key] = key, true
    end
  end
  for key in pairs(dict) do
    if not seen[key] then
      others[#others + 1] = key
    end
  end
  table.sort(others, usual_order)
  for _, key in ipairs(others) do
    keys[#keys + 1] = key
  end
  return keys
end

--- [key, value] pairs.
function M.items(dict)
  local out = M.list()
  for i, key in ipairs(M.keys(dict)) do
    out[i] = M.list({ key, dict[key] })
  end
  return out
end

-- ---- strings ----

local continuation = lpeg.R("\128\191")
local character = lpeg.C(lpeg.P(1) * continuation ^ 0)
local characters = lpeg.Ct(character ^ 0)

--- The characters of a string.
---@return string[]
function M.chars(text)
  return M.list(characters:match(text))
end

local spaces = {}
for c in (" \t\n\r\v\f\28\29\30\31"):gmatch(".") do
  spaces[c] = true
end
-- U+0085, U+00A0, U+1680, U+2028, U+2029, U+202F, U+205F, U+3000, and below U+2000 to U+200A.
local wide = "\194\133 \194\160 \225\154\128 \226\128\168 \226\128\169 "
  .. "\226\128\175 \226\129\159 \227\128\128"
for c in wide:gmatch("[^ ]+") do
  spaces[c] = true
end
for i = 0, 10 do
  spaces["\226\128" .. string.char(128 + i)] = true
end

--- Python's strip, lstrip (left only) and rstrip (right only).
---@param set? string|userdata  the characters to strip; none: white space
function M.strip(text, set, left, right)
  local strips = spaces
  if type(set) == "string" then
    strips = {}
    for _, c in ipairs(M.chars(set)) do
      strips[c] = true
    end
  end
  local chars = M.chars(text)
  local from, to = 1, #chars
  while left and from <= to and strips[chars[from]] do
    from = from + 1
  end
  while right and to >= from and strips[chars[to]] do
    to = to - 1
  end
  return table.concat(chars, "", from, to)
end

-- ---- printing ----

-- Python's repr of a float; whole numbers are integers here.
local function number_text(x)
  if x ~= x then
    return "nan"
  elseif x == math.huge or x == -math.huge then
    return x > 0 and "inf" or "-inf"
  elseif x % 1 == 0 and math.abs(x) < 1e16 then
    return ("%d"):format(x)
  end
  for digits = 0, 16 do
    local text = ("%." .. digits .. "e"):format(x)
    if tonumber(text) == x then
      local exponent = tonumber(text:match("e(.*)$"))
      if exponent >= -4 and exponent < 16 then
        return ("%." .. math.max(digits - exponent, 0) .. "f"):format(x)
      end
      return text
    end
  end
end

local function repr_string(text)
  local quote = text:find("'", 1, true) and not text:find('"', 1, true) and '"' or "'"
  local escaped = text:gsub("[%c\\" .. quote .. "]", function(c)
    local names = { ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\\"] = "\\\\" }
    return c == quote and "\\" .. quote or names[c] or ("\\x%02x"):format(c:byte())
  end)
  return quote .. escaped .. quote
end

local function repr(value)
  local k = kind(value)
  if k == "string" then
    return repr_string(value)
  elseif k == "list" then
    local out = {}
    for i, item in ipairs(value) do
      out[i] = repr(item)
    end
    return "[" .. table.concat(out, ", ") .. "]"
  elseif k == "dict" then
    local out = {}
    for i, key in ipairs(M.keys(value)) do
      out[i] = repr(key) .. ": " .. repr(value[key])
    end
    return "{" .. table.concat(out, ", ") .. "}"
  end
  return M.str(value)
end

--- What `{{ value }}` prints.
function M.str(value)
  local k = kind(value)
  if k == "string" then
    return value
  elseif k == "number" then
    return number_text(value)
  elseif k == "boolean" then
    return value and "True" or "False"
  elseif k == "none" then
    return "None"
  elseif k == "undefined" then
    return ""
  end
  return (k == "list" or k == "dict") and repr(value) or "<" .. k .. ">"
end

-- ---- truth and comparison ----

function M.truth(value)
  local k = kind(value)
  if k == "list" or k == "dict" then
    return next(value) ~= nil
  end
  return not (k == "none" or k == "undefined" or value == false or value == "" or value == 0)
end

--- Python's ==, which looks into lists and dictionaries.
function M.equals(a, b)
  local k = kind(a)
  if k ~= kind(b) then
    return false
  elseif k == "undefined" or k == "none" then
    return true
  elseif k ~= "list" and k ~= "dict" then
    return a == b
  end
  for key, value in pairs(a) do
    if b[key] == nil or not M.equals(value, b[key]) then
      return false
    end
  end
  for key in pairs(b) do
    if a[key] == nil then
      return false
    end
  end
  return true
end

--- The values that a for loop goes through, or nil.
---@return any[]?
function M.iterate(value)
  local k = kind(value)
  if k == "list" then
    return value
  elseif k == "dict" then
    return M.keys(value)
  elseif k == "string" then
    return M.chars(value)
  elseif k == "undefined" then
    return {}
  end
end

function M.length(value)
  if kind(value) == "string" then
    return #value - select(2, value:gsub("[\128-\191]", ""))
  end
  local items = M.iterate(value)
  return items and #items
end

-- ---- JSON ----

local escapes = {
  ['"'] = '\\"',
  ["\\"] = "\\\\",
  ["\n"] = "\\n",
  ["\r"] = "\\r",
  ["\t"] = "\\t",
  ["\b"] = "\\b",
  ["\f"] = "\\f",
}

local function json_string(text)
  -- %c has 127 too, which Python writes as it is.
  return '"' .. text:gsub('[%z\1-\31"\\]', function(c)
    return escapes[c] or ("\\u%04x"):format(c:byte())
  end) .. '"'
end

local function write_json(out, value, options, depth)
  local k = kind(value)
  if k == "string" then
    out[#out + 1] = json_string(value)
  elseif k == "number" then
    local special = value ~= value and "NaN"
      or value == math.huge and "Infinity"
      or value == -math.huge and "-Infinity"
    out[#out + 1] = special or number_text(value)
  elseif k == "boolean" then
    out[#out + 1] = tostring(value)
  elseif k == "none" then
    out[#out + 1] = "null"
  elseif k == "list" or k == "dict" then
    local keys = k == "dict" and M.keys(value)
    if keys and options.sort_keys then
      table.sort(keys)
    end
    local n = keys and #keys or #value
    local line = options.indent and "\n" .. options.indent:rep(depth + 1)
    out[#out + 1] = keys and "{" or "["
    for i = 1, n do
      out[#out + 1] = (i > 1 and options.comma or "") .. (line or "")
      if keys then
        out[#out + 1] = json_string(M.str(keys[i])) .. options.colon
      end
      write_json(out, value[keys and keys[i] or i], options, depth + 1)
    end
    if line and n > 0 then
      out[#out + 1] = "\n" .. options.indent:rep(depth)
    end
    out[#out + 1] = keys and "}" or "]"
  else
    error(("Object of type %s is not JSON serializable"):format(k), 0)
  end
end

--- json.dumps(value, ensure_ascii=False) with Python's spacing.
---@param options? { indent?: integer|string, separators?: string[], sort_keys?: boolean }
---@return string
function M.json(value, options)
  options = options or {}
  local indent = options.indent
  if type(indent) == "number" then
    indent = (" "):rep(indent)
  end
  local separators = options.separators or {}
  local out = {}
  write_json(out, value, {
    indent = type(indent) == "string" and indent or nil,
    comma = separators[1] or (indent and indent ~= M.none and "," or ", "),
    colon = separators[2] or ": ",
    sort_keys = options.sort_keys,
  }, 0)
  return table.concat(out)
end

local P, R, S, V, C, Cc, Ct = lpeg.P, lpeg.R, lpeg.S, lpeg.V, lpeg.C, lpeg.Cc, lpeg.Ct
local blank = S(" \t\r\n") ^ 0

local function sign(text)
  return P(text) * blank
end

local quoted = C(P('"') * (P("\\") * 1 + (1 - S('"\\'))) ^ 0 * '"') / function(text)
  return cjson.decode("[" .. text .. "]")[1]
end
local digits = R("09") ^ 1
local exponent = S("eE") * S("+-") ^ -1 * digits
local number = C(P("-") ^ -1 * digits * (P(".") * digits) ^ -1 * exponent ^ -1) / tonumber
local words = P("true") * Cc(true) + P("false") * Cc(false) + P("null") * Cc(M.none)

local function object(members)
  local dict, keys = {}, {}
  for i = 1, #members, 2 do
    keys[#keys + 1] = members[i]
    dict[members[i]] = members[i + 1]
  end
  return M.dict(dict, keys)
end

local json = P({
  blank * V("value") * -1,
  value = (quoted + number + words + V("list") + V("dict")) * blank,
  list = sign("[") * (Ct((V("value") * (sign(",") * V("value")) ^ 0) ^ -1) / M.list) * "]",
  dict = sign("{") * (Ct((V("member") * (sign(",") * V("member")) ^ 0) ^ -1) / object) * "}",
  member = quoted * blank * sign(":") * V("value"),
})

--- Reads JSON and keeps the order of keys, which templates print.
---@param text string
---@return any
function M.decode(text)
  local value = json:match(text)
  if value == nil then
    cjson.decode(text) -- raises with the place
    error("json: the text is not JSON", 0)
  end
  return value
end

return M
