-- Chat templates: the part of Jinja that they use, with trim_blocks and lstrip_blocks on as transformers renders them.
-- LPeg reads the tags and makes a Lua function of each expression, a second pass trims white space and nests the blocks.
-- Values are Python's (pyvalue.lua), what can be done with them is in template_library.lua.
local lpeg = require("lpeg")
local library = require("liger.data.template_library")
local pyvalue = require("liger.data.pyvalue")

local M = {}

local P, R, S, V = lpeg.P, lpeg.R, lpeg.S, lpeg.V
local C, Cc, Cf, Cg, Cp, Ct = lpeg.C, lpeg.Cc, lpeg.Cf, lpeg.Cg, lpeg.Cp, lpeg.Ct

local kind, truth = pyvalue.kind, pyvalue.truth
local fail = library.fail

-- ---- expressions: each becomes a function of the scope ----

local function constant(value)
  return function()
    return value
  end
end

local function variable(name)
  return function(scope)
    local value = scope[name]
    if value == nil then
      return pyvalue.undefined(("'%s' is undefined"):format(name))
    end
    return value
  end
end

local function list_of(items)
  return function(scope)
    local out = pyvalue.list()
    for i, item in ipairs(items) do
      out[i] = item(scope)
    end
    return out
  end
end

local function dict_of(members)
  return function(scope)
    local out, keys = {}, {}
    for i = 1, #members, 2 do
      local key = members[i](scope)
      keys[#keys + 1] = key
      out[key] = members[i + 1](scope)
    end
    return pyvalue.dict(out, keys)
  end
end

-- Arguments are { name?, function } pairs; values come back as a list and a table by name.
local function values_of(args, scope)
  local list, named = {}, {}
  for _, arg in ipairs(args) do
    local value = arg.value(scope)
    if arg.name then
      named[arg.name] = value
    else
      list[#list + 1] = value
    end
  end
  return list, named
end

local function conditional(value, condition, otherwise)
  if not condition then
    return value
  end
  return function(scope)
    if truth(condition(scope)) then
      return value(scope)
    end
    return otherwise and otherwise(scope)
      or pyvalue.undefined("the inline if-expression evaluated to false and no else section was defined.")
  end
end

local function binary(left, operator, right)
  if operator == "and" then
    return function(scope)
      local value = left(scope)
      return truth(value) and right(scope) or not truth(value) and value or right(scope)
    end
  elseif operator == "or" then
    return function(scope)
      local value = left(scope)
      if truth(value) then
        return value
      end
      return right(scope)
    end
  end
  local apply = library.operators[operator]
  return function(scope)
    return apply(scope, left(scope), right(scope))
  end
end

-- a < b < c compares neighbours, as Python does.
local function comparison(first, rest)
  if #rest == 0 then
    return first
  end
  return function(scope)
    local left = first(scope)
    for i = 1, #rest, 2 do
      local right = rest[i + 1](scope)
      if not library.operators[rest[i]](scope, left, right) then
        return false
      end
      left = right
    end
    return true
  end
end

local function unary(operator, value)
  if operator == "not" then
    return function(scope)
      return not truth(value(scope))
    end
  end
  return function(scope)
    local x = value(scope)
    if kind(x) ~= "number" then
      fail(scope, ("bad operand type for unary %s: %s"):format(operator, kind(x)))
    end
    return operator == "-" and -x or x
  end
end

local postfix = {}

function postfix.attribute(value, name)
  return function(scope)
    return library.attribute(scope, value(scope), name)
  end
end

function postfix.item(value, key)
  return function(scope)
    return library.item(scope, value(scope), key(scope))
  end
end

function postfix.slice(value, from, to, step)
  return function(scope)
    local function bound(x)
      local n = x and x(scope)
      return kind(n) ~= "none" and n or nil
    end
    return library.slice(scope, value(scope), bound(from), bound(to), bound(step))
  end
end

function postfix.call(value, args)
  return function(scope)
    local callee = value(scope)
    if kind(callee) == "undefined" then
      fail(scope, callee.message)
    elseif kind(callee) ~= "function" then
      fail(scope, ("'%s' object is not callable"):format(kind(callee)))
    end
    return callee(scope, values_of(args, scope))
  end
end

function postfix.filter(value, name, args)
  local filter = library.filters[name] or error(("No filter named '%s'."):format(name), 0)
  return function(scope)
    return filter(scope, value(scope), values_of(args or {}, scope))
  end
end

function postfix.test(value, negated, name, args)
  local test = library.tests[name] or error(("No test named '%s'."):format(name), 0)
  return function(scope)
    return test(scope, value(scope), (values_of(args or {}, scope))) ~= negated
  end
end

local function apply_postfix(value, which, ...)
  return postfix[which](value, ...)
end

-- ---- the grammar ----

local letter = R("az", "AZ") + "_"
local word = letter * (letter + R("09")) ^ 0
local space = S(" \t\n\r\v\f") ^ 0

local function symbol(text)
  return P(text) * space
end

local function keyword(text)
  return P(text) * -(letter + R("09")) * space
end

local reserved = P(false)
for _, text in ipairs({ "and", "or", "not", "in", "is", "if", "else" }) do
  reserved = reserved + keyword(text)
end

local any_name = C(word) * space
local name = C(word - reserved) * space

local escapes = { n = "\n", t = "\t", r = "\r", b = "\b", f = "\f", v = "\v", a = "\a", ["0"] = "\0", ["\n"] = "" }

local function utf8_char(hex)
  local code = tonumber(hex, 16)
  if code < 0x80 then
    return string.char(code)
  elseif code < 0x800 then
    return string.char(0xC0 + math.floor(code / 64), 0x80 + code % 64)
  elseif code < 0x10000 then
    return string.char(0xE0 + math.floor(code / 4096), 0x80 + math.floor(code / 64) % 64, 0x80 + code % 64)
  end
  return string.char(
    0xF0 + math.floor(code / 262144),
    0x80 + math.floor(code / 4096) % 64,
    0x80 + math.floor(code / 64) % 64,
    0x80 + code % 64
  )
end

local hex = R("09", "af", "AF")
local escape = P("\\")
  * (
    P("x") * (C(hex * hex) / utf8_char)
    + P("u") * (C(hex * hex * hex * hex) / utf8_char)
    + P("U") * (C(hex * hex * hex * hex * hex * hex * hex * hex) / utf8_char)
    + C(1) / function(c)
      return escapes[c] or (c:find("[\\'\"]") and c) or "\\" .. c
    end
  )

local function quoted(quote)
  return P(quote) * lpeg.Cs((escape + (1 - S("\\" .. quote))) ^ 0) * quote * space
end

local one_string = quoted("'") + quoted('"')
local text = Cf(one_string * one_string ^ 0, function(a, b)
  return a .. b
end) / constant

local digits = R("09") ^ 1
local number = C(digits * (P(".") * digits) ^ -1 * (S("eE") * S("+-") ^ -1 * digits) ^ -1)
  * space
  / function(source)
    return constant(tonumber(source))
  end

local function literal(spelling, value)
  return keyword(spelling) * Cc(value) / constant
end

local function fold(operand, operator)
  return Cf(operand * Cg(operator * operand) ^ 0, binary)
end

local comparator = C(P("==") + "!=" + "<=" + ">=" + "<" + ">") * space
  + keyword("not") * keyword("in") * Cc("not in")
  + keyword("in") * Cc("in")

local function one_of(...)
  local pattern = P(false)
  for _, operator in ipairs({ ... }) do
    pattern = pattern + P(operator)
  end
  return C(pattern) * space
end

-- Trailing minus signs of a tag are not operators.
local tag_end = S("-+") ^ -1 * (P("}}") + "%}")

local function argument(first, value)
  if value then
    return { name = first, value = value }
  end
  return { value = first }
end

local function tuple(first, ...)
  return select("#", ...) > 0 and list_of({ first, select(2, ...) }) or first
end

local rules = {
  "expression",
  expression = V("either") * (keyword("if") * V("either") * (keyword("else") * V("expression")) ^ -1) ^ -1 / conditional,
  either = fold(V("both"), keyword("or") * Cc("or")),
  both = fold(V("negation"), keyword("and") * Cc("and")),
  negation = C("not") * -(letter + R("09")) * space * V("negation") / unary + V("comparison"),
  comparison = V("sum") * Ct((comparator * V("sum")) ^ 0) / comparison,
  sum = fold(V("joined"), one_of("+", "-") - tag_end),
  joined = fold(V("product"), one_of("~")),
  product = fold(V("power"), one_of("//", "/", "*", "%") - P("%}") - P("**")),
  power = fold(V("signed"), one_of("**")),
  signed = C(S("+-")) * space * V("signed") / unary + V("filtered"),
  filtered = Cf(V("value") * Cg(V("suffix") + V("pipe") + V("is")) ^ 0, apply_postfix),
  plain = Cf(V("value") * Cg(V("suffix")) ^ 0, apply_postfix),
  suffix = symbol(".") * Cc("attribute") * (any_name + C(digits) * space / tonumber)
    + symbol("[") * V("index") * symbol("]")
    + Cc("call") * V("arguments"),
  index = Cc("slice") * V("bound") * symbol(":") * V("bound") * (symbol(":") * V("bound") + Cc(false))
    + Cc("item") * V("tuple"),
  bound = V("expression") + Cc(false),
  pipe = symbol("|") * Cc("filter") * any_name * V("arguments") ^ -1,
  is = keyword("is") * Cc("test") * (keyword("not") * Cc(true) + Cc(false)) * any_name * (V("arguments") + V(
    "test_argument"
  )) ^ -1,
  test_argument = Ct(V("plain") / argument),
  arguments = symbol("(") * Ct((V("argument") * (symbol(",") * V("argument")) ^ 0 * symbol(",") ^ -1) ^ -1) * symbol(")"),
  argument = (name * symbol("=") * -P("=") * V("expression") + V("expression")) / argument,
  value = text
    + number
    + literal("true", true)
    + literal("True", true)
    + literal("false", false)
    + literal("False", false)
    + literal("none", pyvalue.none)
    + literal("None", pyvalue.none)
    + name / variable
    + symbol("(") * symbol(")") * Ct("") / list_of
    + symbol("(") * V("tuple") * symbol(")")
    + symbol("[") * (Ct(V("items") ^ -1) / list_of) * symbol("]")
    + symbol("{") * (Ct((V("member") * (symbol(",") * V("member")) ^ 0 * symbol(",") ^ -1) ^ -1) / dict_of) * symbol("}"),
  items = V("expression") * (symbol(",") * V("expression")) ^ 0 * symbol(",") ^ -1,
  tuple = Ct(V("items")) * Cp() / function(items)
    return items
  end / function(items)
    return #items == 1 and items[1] or list_of(items)
  end,
  member = V("expression") * symbol(":") * V("expression"),
}

return M, rules, tuple
