-- Filters of chat templates: functions of the scope, the value, the arguments and the named
-- arguments.
local library = require("liger.data.template_library")
local methods = require("liger.data.template_methods")
local pyvalue = require("liger.data.pyvalue")

local kind, truth, str, list = pyvalue.kind, pyvalue.truth, pyvalue.str, pyvalue.list
local fail, type_name, optional = methods.fail, methods.type_name, methods.optional
local want_defined, want_items = methods.want_defined, methods.want_items
local strings, lists = methods.strings, methods.lists

local filters = {}

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
  return strings.replace(scope, str(want_defined(scope, value)), args)
end

function filters.join(scope, value, args, named)
  local separator, attribute = optional(args[1] or named.d), args[2] or named.attribute
  local out = {}
  for i, item in ipairs(want_items(scope, value)) do
    out[i] = str(attribute and library.path(scope, item, attribute) or item)
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
  return library.slice(scope, sliced, nil, nil, -1)
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
      return library.operators["<"](scope, b.by, a.by)
    end
    return library.operators["<"](scope, a.by, b.by)
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
    return named.attribute and library.path(scope, item, named.attribute) or item
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
    total = library.operators["+"](scope, total, item)
  end
  return total
end

local function extreme(operator)
  return function(scope, value)
    local best
    for _, item in ipairs(want_items(scope, value)) do
      if best == nil or library.operators[operator](scope, item, best) then
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
      local part = library.path(scope, item, named.attribute)
      out[i] = kind(part) == "undefined" and named.default ~= nil and named.default or part
    end
  end
  return out
end

-- select, reject and their attr forms: a test by name, or the value's truth.
local function selecting(wanted, by_attribute)
  return function(scope, value, args)
    local at = by_attribute and 2 or 1
    local test = args[at] and find(scope, library.tests, "test", args[at])
    local rest = { unpack(args, at + 1) }
    local out = list()
    for _, item in ipairs(want_items(scope, value)) do
      local tested = by_attribute and library.path(scope, item, args[1]) or item
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

return filters
