-- What chat templates can do with values: attributes, slices, operators, tests, global functions.
-- Every function takes the scope first, which knows the line for errors.
local methods = require("liger.data.template_methods")
local pyvalue = require("liger.data.pyvalue")

local M = {}

local kind, str, list = pyvalue.kind, pyvalue.str, pyvalue.list
local type_name, want_items = methods.type_name, methods.want_items
local want_defined, want_string = methods.want_defined, methods.want_string

M.STATE, M.fail = methods.STATE, methods.fail

local fail = M.fail

-- ---- parts of values ----

local function method(value, name)
  local among = methods.by_kind[kind(value)]
  local found = among and among[name]
  return found
    and function(scope, args, named)
      return found(scope, value, args, named)
    end
end

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

--- A dotted path, as filters take it.
function M.path(scope, value, name)
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
