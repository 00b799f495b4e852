-- Reads the tags of chat templates with LPeg: `{{ print }}`, `{% statement %}`, `{# comment #}`.
-- Each expression becomes a Lua function of the scope.
local lpeg = require("lpeg")
local library = require("liger.data.template_library")
local filters = require("liger.data.template_filters")
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
    if otherwise then
      return otherwise(scope)
    end
    return pyvalue.undefined("the inline if-expression is false and has no else")
  end
end

local function binary(left, operator, right)
  if operator == "and" then
    return function(scope)
      local value = left(scope)
      if truth(value) then
        return right(scope)
      end
      return value
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
  return function(scope)
    local filter = filters[name] or fail(scope, ("No filter named '%s'."):format(name))
    return filter(scope, value(scope), values_of(args or {}, scope))
  end
end

function postfix.test(value, negated, name, args)
  return function(scope)
    local test = library.tests[name] or fail(scope, ("No test named '%s'."):format(name))
    return test(scope, value(scope), (values_of(args or {}, scope))) ~= negated
  end
end

local function apply_postfix(value, which, ...)
  return postfix[which](value, ...)
end

-- ---- the grammar ----

local letter = R("az", "AZ") + "_"
local word = letter * (letter + R("09")) ^ 0
-- White space inside tags; remembers how far the reading came, which is where an error is.
local space = S(" \t\n\r\v\f") ^ 0 * lpeg.Cmt(lpeg.Carg(1), function(_, at, progress)
  progress.at = math.max(progress.at, at)
  return true
end)

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

local escapes = { n = "\n", t = "\t", r = "\r", b = "\b", f = "\f", v = "\v", a = "\a" }
escapes["0"], escapes["\n"] = "\0", ""

local function utf8_char(digits_)
  local code = tonumber(digits_, 16)
  local function low(shift)
    return 0x80 + math.floor(code / shift) % 64
  end
  if code < 0x80 then
    return string.char(code)
  elseif code < 0x800 then
    return string.char(0xC0 + math.floor(code / 64), low(1))
  elseif code < 0x10000 then
    return string.char(0xE0 + math.floor(code / 4096), low(64), low(1))
  end
  return string.char(0xF0 + math.floor(code / 262144), low(4096), low(64), low(1))
end

local hex = R("09", "af", "AF")
-- A substitution: what is not captured must be dropped.
local escape = P("\\") / ""
  * (
    P("x") / "" * (C(hex * hex) / utf8_char)
    + P("u") / "" * (C(hex * hex * hex * hex) / utf8_char)
    + P("U") / "" * (C(hex * hex * hex * hex * hex * hex * hex * hex) / utf8_char)
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

local function parenthesised(items)
  return #items == 1 and items[1] or list_of(items)
end

-- Any number of items, a comma behind the last allowed.
local function separated(item)
  return Ct((item * (symbol(",") * item) ^ 0 * symbol(",") ^ -1) ^ -1)
end

local rules = {
  expression = V("either") * (keyword("if") * V("either") * V("otherwise") ^ -1) ^ -1 / conditional,
  otherwise = keyword("else") * V("expression"),
  either = fold(V("both"), keyword("or") * Cc("or")),
  both = fold(V("negation"), keyword("and") * Cc("and")),
  negation = C("not") * -(letter + R("09")) * space * V("negation") / unary + V("comparison"),
  comparison = V("sum") * Ct((comparator * V("sum")) ^ 0) / comparison,
  sum = fold(V("joined"), one_of("+", "-") - tag_end),
  joined = fold(V("product"), one_of("~")),
  product = fold(V("power"), one_of("//", "/", "*", "%") - P("%}") - P("**")),
  power = fold(V("filtered"), one_of("**")),
  filtered = Cf(V("operand") * Cg(V("pipe") + V("is") + V("suffix")) ^ 0, apply_postfix),
  operand = C(S("+-")) * space * V("operand") / unary + V("plain"),
  plain = Cf(V("value") * Cg(V("suffix")) ^ 0, apply_postfix),
  suffix = symbol(".") * Cc("attribute") * (any_name + C(digits) * space / tonumber)
    + symbol("[") * V("index") * symbol("]")
    + Cc("call") * V("arguments"),
  index = Cc("slice") * V("bound") * V("colon_bound") * (V("colon_bound") + Cc(false))
    + Cc("item") * V("tuple"),
  bound = V("expression") + Cc(false),
  colon_bound = symbol(":") * V("bound"),
  pipe = symbol("|") * Cc("filter") * any_name * V("arguments") ^ -1,
  is = keyword("is") * Cc("test") * V("negated") * any_name * V("test_arguments") ^ -1,
  negated = keyword("not") * Cc(true) + Cc(false),
  test_arguments = V("arguments") + V("test_argument"),
  test_argument = Ct(V("plain") / argument),
  arguments = symbol("(") * separated(V("argument")) * symbol(")"),
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
    + symbol("[") * (separated(V("expression")) / list_of) * symbol("]")
    + symbol("{") * (separated(V("member")) / dict_of) * symbol("}"),
  tuple = #V("expression") * separated(V("expression")) / parenthesised,
  member = V("expression") * symbol(":") * V("expression"),
}

local function field(key, pattern)
  return Cg(pattern, key)
end

local function comma_list(item)
  return Ct(item * (symbol(",") * item) ^ 0)
end

local targets = symbol("(") * comma_list(name) * symbol(")") + comma_list(name)

local function statement(word_, body)
  return keyword(word_) * field("kind", Cc(word_)) * (body or P(true))
end

local equals = symbol("=") * field("value", V("tuple"))
local attribute_target = field("object", name) * symbol(".") * field("attribute", any_name)

rules.statement = statement(
  "for",
  field("targets", targets)
    * keyword("in")
    * field("values", comma_list(V("either")) / parenthesised)
    * (keyword("if") * field("condition", V("expression"))) ^ -1
    * keyword("recursive") ^ -1
) + statement("if", field("condition", V("tuple")))
  + statement("elif", field("condition", V("tuple")))
  + statement("set", attribute_target * equals + field("targets", targets) * equals ^ -1)
  + statement(
    "macro",
    field("name", name)
      * symbol("(")
      * field("parameters", separated(V("parameter")))
      * symbol(")")
  )
rules.parameter = Ct(field("name", name) * (symbol("=") * field("default", V("expression"))) ^ -1)
for _, spelling in ipairs({
  "else",
  "endif",
  "endfor",
  "endset",
  "endmacro",
  "generation",
  "endgeneration",
  "break",
  "continue",
}) do
  rules.statement = rules.statement + statement(spelling)
end

local left_mark = field("left", C(S("-+") ^ -1)) * space
local right_mark = field("right", C(S("-+") ^ -1))
rules[1] = "tag"
local comment_end = S("-+") ^ -1 * P("#}")
local print_tag = field("kind", Cc("print")) * left_mark * field("value", V("tuple")) * right_mark
local comment = field("kind", Cc("comment")) * left_mark * (1 - comment_end) ^ 0 * right_mark
rules.tag = (
  Ct(P("{{") * print_tag * "}}")
  + Ct(P("{%") * left_mark * V("statement") * right_mark * "%}")
  + Ct(P("{#") * comment * "#}")
) * Cp()

--- Matches one tag: a table with `kind`, `left`, `right` and its parts, and the place behind it.
--- The extra argument of the match is a table whose `at` becomes the furthest place read, for
--- errors.
M.tag = P(rules)

return M
