-- What chat templates can do with values: attributes, operators, methods of strings and
-- dictionaries, filters, tests, functions. Every function takes the scope first, which knows the
-- line for errors.
local pyvalue = require("liger.data.pyvalue")

local M = {}

local kind, truth, str, list = pyvalue.kind, pyvalue.truth, pyvalue.str, pyvalue.list

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

local methods = { string = strings, dict = dicts, list = lists }

local function method(value, name)
  local found = methods[kind(value)] and methods[kind(value)][name]
  return found
    and function(scope, args, named)
      return found(scope, value, args, named)
    end
end

-- ---- parts of values ----

local function missing(value, name)
  return pyvalue.undefined(("'%s' has no attribute '%s'"):format(type_name(value), str(name)))
end

local function entry(value, key)
  local k = kind(value)
  if k == "dict" or k == "namespace" then
    return value[key]
  elseif k == "list" and type(key) == "number" then
    return value[key >= 0 and key + 1 or #value + key + 1]
  elseif k == "string" and type(key) == "number" then
    local chars = pyvalue.chars(value)
    return chars[key >= 0 and key + 1 or #chars + key + 1]
  end
end

local function first_of(a, b, value, name)
  if a ~= nil then
    return a
  elseif b ~= nil then
    return b
  end
  return missing(value, name)
end

--- value.name: a method, else an entry.
function M.attribute(scope, value, name)
  want_defined(scope, value)
  return first_of(method(value, name), entry(value, name), value, name)
end

--- value[key]: an entry, else a method.
function M.item(scope, value, key)
  want_defined(scope, value)
  local found = type(key) == "string" and method(value, key) or nil
  return first_of(entry(value, key), found, value, key)
end

--- value[from:to:step]
function M.slice(scope, value, from, to, step)
  want_defined(scope, value)
  local is_string = kind(value) == "string"
  if not is_string and kind(value) ~= "list" then
    fail(scope, ("a %s cannot be sliced"):format(kind(value)))
  end
  local items = is_string and pyvalue.chars(value) or value
  local n = #items
  step = step or 1
  if step == 0 then
    fail(scope, "slice step cannot be zero")
  end
  local function clamp(i, otherwise, low, high)
    if i == nil then
      return otherwise
    end
    return math.max(low, math.min(i < 0 and i + n or i, high))
  end
  local out = list()
  if step > 0 then
    for i = clamp(from, 0, 0, n), clamp(to, n, 0, n) - 1, step do
      out[#out + 1] = items[i + 1]
    end
  else
    for i = clamp(from, n - 1, -1, n - 1), clamp(to, -1, -1, n - 1) + 1, step do
      out[#out + 1] = items[i + 1]
    end
  end
  return is_string and table.concat(out) or out
end

-- A dotted path, as filters take it.
local function path(scope, value, name)
  if type(name) == "number" then
    return M.item(scope, value, name)
  end
  for part in name:gmatch("[^.]+") do
    value = M.item(scope, value, tonumber(part) or part)
  end
  return value
end

-- ---- operators ----

local function contains(scope, item, container)
  local k = kind(want_defined(scope, container))
  if k == "string" then
    return container:find(want_string(scope, item, "the text before 'in'"), 1, true) ~= nil
  elseif k == "dict" then
    return container[item] ~= nil
  end
  for _, value in ipairs(want_items(scope, container)) do
    if pyvalue.equals(item, value) then
      return true
    end
  end
  return false
end

local function add(scope, a, b)
  local k = kind(want_defined(scope, a))
  want_defined(scope, b)
  if k == kind(b) then
    if k == "string" then
      return a .. b
    elseif k == "number" then
      return a + b
    elseif k == "list" then
      local out = list()
      for _, items in ipairs({ a, b }) do
        for _, item in ipairs(items) do
          out[#out + 1] = item
        end
      end
      return out
    end
  end
  fail(scope, ("cannot add %s and %s"):format(kind(a), kind(b)))
end

local function arithmetic(name, apply)
  return function(scope, a, b)
    want_defined(scope, a)
    want_defined(scope, b)
    if type(a) == "string" and type(b) == "number" and name == "*" then
      return a:rep(b)
    elseif type(a) ~= "number" or type(b) ~= "number" then
      fail(scope, ("cannot apply %s to %s and %s"):format(name, kind(a), kind(b)))
    elseif b == 0 and name:find("[/%%]") then
      fail(scope, "division by zero")
    end
    return apply(a, b)
  end
end

local function order(name, apply)
  return function(scope, a, b)
    want_defined(scope, a)
    want_defined(scope, b)
    if kind(a) ~= kind(b) or (type(a) ~= "number" and type(a) ~= "string") then
      fail(scope, ("cannot compare %s %s %s"):format(kind(a), name, kind(b)))
    end
    return apply(a, b)
  end
end

-- stylua: ignore
M.operators = {
  ["+"] = add,
  ["-"] = arithmetic("-", function(a, b) return a - b end),
  ["*"] = arithmetic("*", function(a, b) return a * b end),
  ["/"] = arithmetic("/", function(a, b) return a / b end),
  ["//"] = arithmetic("//", function(a, b) return math.floor(a / b) end),
  ["%"] = arithmetic("%", function(a, b) return a % b end),
  ["**"] = arithmetic("**", function(a, b) return a ^ b end),
  ["~"] = function(_, a, b) return str(a) .. str(b) end,
  ["=="] = function(_, a, b) return pyvalue.equals(a, b) end,
  ["!="] = function(_, a, b) return not pyvalue.equals(a, b) end,
  ["<"] = order("<", function(a, b) return a < b end),
  ["<="] = order("<=", function(a, b) return a <= b end),
  [">"] = order(">", function(a, b) return a > b end),
  [">="] = order(">=", function(a, b) return a >= b end),
  ["in"] = contains,
  ["not in"] = function(scope, a, b) return not contains(scope, a, b) end,
}

-- ---- tests ----

local function is_kind(...)
  local kinds = {}
  for _, k in ipairs({ ... }) do
    kinds[k] = true
  end
  return function(_, value)
    return kinds[kind(value)] == true
  end
end

local function as_test(operator)
  return function(scope, value, args)
    return M.operators[operator](scope, value, args[1])
  end
end

-- stylua: ignore
local tests = {
  defined = function(_, value) return kind(value) ~= "undefined" end,
  undefined = is_kind("undefined"),
  none = is_kind("none"),
  string = is_kind("string"),
  number = is_kind("number", "boolean"),
  integer = function(_, value) return type(value) == "number" and value % 1 == 0 end,
  float = function(_, value) return type(value) == "number" and value % 1 ~= 0 end,
  boolean = is_kind("boolean"),
  mapping = is_kind("dict"),
  sequence = is_kind("list", "string", "dict"),
  iterable = is_kind("list", "string", "dict", "undefined"),
  callable = is_kind("function"),
  ["true"] = function(_, value) return value == true end,
  ["false"] = function(_, value) return value == false end,
  odd = function(_, value) return value % 2 == 1 end,
  even = function(_, value) return value % 2 == 0 end,
  divisibleby = function(_, value, args) return value % args[1] == 0 end,
  lower = function(_, value) return value == value:lower() and value ~= value:upper() end,
  upper = function(_, value) return value == value:upper() and value ~= value:lower() end,
  sameas = function(_, value, args) return rawequal(value, args[1]) end,
  ["in"] = as_test("in"),
}
for operator, names in pairs({
  ["=="] = { "eq", "equalto" },
  ["!="] = { "ne" },
  ["<"] = { "lt", "lessthan" },
  ["<="] = { "le" },
  [">"] = { "gt", "greaterthan" },
  [">="] = { "ge" },
}) do
  tests[operator] = as_test(operator)
  for _, name in ipairs(names) do
    tests[name] = as_test(operator)
  end
end
M.tests = tests

-- ---- filters ----

local filters = {}
M.filters = filters

function filters.trim(_, value, args, named)
  return pyvalue.strip(str(value), optional(args[1] or named.chars), true, true)
end

function filters.tojson(scope, value, args, named)
  want_defined(scope, value)
  return pyvalue.json(value, {
    ensure_ascii = optional(named.ensure_ascii),
    indent = optional(args[1] or named.indent),
    separators = optional(named.separators),
    sort_keys = optional(named.sort_keys),
  })
end

function filters.length(scope, value)
  local n = pyvalue.length(value)
  return n or fail(scope, ("object of type '%s' has no len()"):format(type_name(value)))
end

filters.count = filters.length

for _, name in ipairs({ "upper", "lower", "title", "capitalize" }) do
  filters[name] = function(scope, value)
    return strings[name](scope, str(value))
  end
end

function filters.replace(scope, value, args)
  return replace(scope, str(want_defined(scope, value)), args)
end

function filters.join(scope, value, args, named)
  local separator, attribute = optional(args[1] or named.d), args[2] or named.attribute
  local out = {}
  for i, item in ipairs(want_items(scope, value)) do
    out[i] = str(attribute and path(scope, item, attribute) or item)
  end
  return table.concat(out, separator and str(separator) or "")
end

function filters.default(_, value, args, named)
  local instead = args[1]
  if instead == nil then
    instead = named.default_value == nil and "" or named.default_value
  end
  local also_false = args[2] or named.boolean
  if kind(value) == "undefined" or (also_false and truth(also_false) and not truth(value)) then
    return instead
  end
  return value
end

filters.d = filters.default

function filters.items(scope, value)
  if kind(value) == "undefined" then
    return list()
  elseif kind(value) ~= "dict" then
    fail(scope, ("items: value is a %s, wanted a mapping"):format(kind(value)))
  end
  return pyvalue.items(value)
end

function filters.list(scope, value)
  local out = list()
  for i, item in ipairs(want_items(scope, value)) do
    out[i] = item
  end
  return out
end

function filters.string(_, value)
  return str(value)
end

filters.safe = function(_, value)
  return value
end

function filters.int(_, value, args)
  local n = tonumber(value)
  if not n then
    return args[1] or 0
  end
  return n < 0 and math.ceil(n) or math.floor(n)
end

function filters.float(_, value, args)
  return tonumber(value) or args[1] or 0
end

function filters.abs(_, value)
  return math.abs(value)
end

function filters.round(_, value, args)
  local scale = 10 ^ (args[1] or 0)
  return math.floor(value * scale + 0.5) / scale
end

function filters.first(scope, value)
  local items = want_items(scope, value)
  return items[1] == nil and pyvalue.undefined("No first item, sequence was empty.") or items[1]
end

function filters.last(scope, value)
  local items = want_items(scope, value)
  return items[1] == nil and pyvalue.undefined("No last item, sequence was empty.") or items[#items]
end

function filters.reverse(scope, value)
  local sliced = kind(value) == "string" and value or filters.list(scope, value)
  return M.slice(scope, sliced, nil, nil, -1)
end

local function sorted(scope, items, key, reverse)
  local marked = {}
  for i, item in ipairs(items) do
    local by = key(item)
    marked[i] = { item = item, by = type(by) == "string" and by:lower() or by, at = i }
  end
  table.sort(marked, function(a, b)
    if pyvalue.equals(a.by, b.by) then
      return a.at < b.at
    elseif reverse then
      return M.operators["<"](scope, b.by, a.by)
    end
    return M.operators["<"](scope, a.by, b.by)
  end)
  local out = list()
  for i, m in ipairs(marked) do
    out[i] = m.item
  end
  return out
end

function filters.sort(scope, value, args, named)
  local reverse = args[1] or named.reverse
  return sorted(scope, want_items(scope, value), function(item)
    return named.attribute and path(scope, item, named.attribute) or item
  end, reverse and truth(reverse))
end

function filters.dictsort(scope, value)
  return sorted(scope, filters.items(scope, value), function(item)
    return item[1]
  end)
end

function filters.unique(scope, value)
  local out = list()
  for _, item in ipairs(want_items(scope, value)) do
    if lists.count(scope, out, { item }) == 0 then
      out[#out + 1] = item
    end
  end
  return out
end

function filters.sum(scope, value)
  local total = 0
  for _, item in ipairs(want_items(scope, value)) do
    total = add(scope, total, item)
  end
  return total
end

local function extreme(operator)
  return function(scope, value)
    local best
    for _, item in ipairs(want_items(scope, value)) do
      if best == nil or M.operators[operator](scope, item, best) then
        best = item
      end
    end
    return best == nil and pyvalue.undefined("No aggregated item, sequence was empty.") or best
  end
end

filters.min = extreme("<")
filters.max = extreme(">")

function filters.indent(_, value, args, named)
  local width = args[1] or named.width or 4
  local first, blank = args[2] or named.first or false, args[3] or named.blank or false
  local pad = type(width) == "string" and width or (" "):rep(width)
  local text = str(value):gsub("\n([^\n]*)", function(line)
    return "\n" .. ((line ~= "" or truth(blank)) and pad or "") .. line
  end)
  return (truth(first) and pad or "") .. text
end

local function find(scope, among, what, name)
  return among[name] or fail(scope, ("No %s named '%s'."):format(what, str(name)))
end

function filters.map(scope, value, args, named)
  local out = list()
  local filter = not named.attribute and find(scope, filters, "filter", args[1])
  local rest = { unpack(args, 2) }
  for i, item in ipairs(want_items(scope, value)) do
    if filter then
      out[i] = filter(scope, item, rest, named)
    else
      local part = path(scope, item, named.attribute)
      out[i] = kind(part) == "undefined" and named.default ~= nil and named.default or part
    end
  end
  return out
end

-- select, reject and their attr forms: a test by name, or the value's truth.
local function selecting(wanted, by_attribute)
  return function(scope, value, args)
    local at = by_attribute and 2 or 1
    local test = args[at] and find(scope, tests, "test", args[at])
    local rest = { unpack(args, at + 1) }
    local out = list()
    for _, item in ipairs(want_items(scope, value)) do
      local tested = by_attribute and path(scope, item, args[1]) or item
      local passes = truth(tested)
      if test then
        passes = test(scope, tested, rest)
      end
      if passes == wanted then
        out[#out + 1] = item
      end
    end
    return out
  end
end

filters.select = selecting(true, false)
filters.reject = selecting(false, false)
filters.selectattr = selecting(true, true)
filters.rejectattr = selecting(false, true)

-- ---- functions ----

local globals = {}
M.globals = globals

function globals.raise_exception(scope, args)
  fail(scope, str(args[1]))
end

function globals.strftime_now(scope, args)
  return os.date(want_string(scope, args[1], "the format")) --[[@as string]]
end

function globals.namespace(_, args, named)
  local out = {}
  for _, from in ipairs({ args[1] or {}, named }) do
    for key, value in pairs(from) do
      out[key] = value
    end
  end
  return pyvalue.namespace(out)
end

function globals.dict(_, args, named)
  local out = {}
  for _, from in ipairs({ args[1] or {}, named }) do
    for key, value in pairs(from) do
      out[key] = value
    end
  end
  return pyvalue.dict(out)
end

function globals.range(_, args)
  local from, to, step = args[1], args[2], args[3] or 1
  if not to then
    from, to = 0, from
  end
  local out = list()
  for i = from, to + (step > 0 and -1 or 1), step do
    out[#out + 1] = i
  end
  return out
end

return M
