-- Chat templates: the part of Jinja that they use, with trim_blocks and lstrip_blocks on as
-- transformers renders them. LPeg reads the tags and makes a Lua function of each expression, a
-- second pass trims white space and nests the blocks. Values are Python's (pyvalue.lua), what can
-- be done with them is in template_library.lua.
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
    local filter = library.filters[name] or fail(scope, ("No filter named '%s'."):format(name))
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
local tag = P(rules)

-- ---- the source as a list of texts and tags ----

local function line_of(source, at)
  return select(2, source:sub(1, at - 1):gsub("\n", "")) + 1
end

local function fail_at(source, at, message)
  error(("chat template, line %d: %s"):format(line_of(source, at), message), 0)
end

local function read_items(source)
  local items, at = {}, 1
  while true do
    local from = source:find("{[{%%#]", at)
    if at < (from or #source + 1) then
      items[#items + 1] = { kind = "text", text = source:sub(at, (from or 0) - 1) }
    end
    if not from then
      return items
    end
    local progress = { at = from }
    local item, next_at = tag:match(source, from, progress)
    if not item then
      local near = source:sub(progress.at):match("^[^\n]*"):sub(1, 40)
      fail_at(source, progress.at, ("cannot be read at '%s'"):format(near))
    end
    item.line = line_of(source, from)
    items[#items + 1] = item
    at = next_at
  end
end

local function is_block(item)
  return item and item.kind ~= "print" and item.kind ~= "text"
end

-- White space around tags: a minus takes all of it; otherwise a block takes the newline behind it
-- and the blanks of its line before it, unless a plus says no.
local function trim(items)
  for i, item in ipairs(items) do
    if item.kind == "text" then
      local before, after, text_ = items[i - 1], items[i + 1], item.text
      local line_starts = not before
      if before and before.right == "-" then
        text_ = text_:gsub("^%s+", "")
      elseif is_block(before) and before.right ~= "+" and text_:sub(1, 1) == "\n" then
        text_, line_starts = text_:sub(2), true
      end
      if after and after.left == "-" then
        text_ = text_:gsub("%s+$", "")
      elseif is_block(after) and after.left ~= "+" then
        local line, blanks = text_:match("^(.*\n)([^\n]*)$")
        if not line then
          line, blanks = "", line_starts and text_ or "x"
        end
        text_ = blanks:find("%S") and text_ or line
      end
      item.text = text_
    end
  end
end

-- ---- statements: each becomes a function of the scope and the output ----

local STATE = library.STATE

local function child(scope)
  return setmetatable({}, { __index = scope })
end

-- A statement may return "break" or "continue", which ends its block.
local function run(block, scope, out)
  for i = 1, #block do
    local signal = block[i](scope, out)
    if signal then
      return signal
    end
  end
end

local function assign(scope, names, value)
  if #names == 1 then
    scope[names[1]] = value
    return
  end
  local items = pyvalue.iterate(value)
  if not items or #items ~= #names then
    fail(scope, ("cannot unpack a %s into %d names"):format(kind(value), #names))
  end
  for i, target in ipairs(names) do
    scope[target] = items[i]
  end
end

-- The values of a loop that pass its condition.
local function loop_values(item, scope)
  local value = item.values(scope)
  local all = pyvalue.iterate(value)
  if not all then
    fail(scope, ("'%s' object is not iterable"):format(kind(value)))
  end
  if not item.condition then
    return all
  end
  local passed = {}
  for _, v in ipairs(all) do
    local inner = child(scope)
    assign(inner, item.targets, v)
    if truth(item.condition(inner)) then
      passed[#passed + 1] = v
    end
  end
  return passed
end

local function loop_variable(values, i)
  local n = #values
  local function cycle(_, args)
    return args[(i - 1) % #args + 1]
  end
  return pyvalue.namespace({
    index = i,
    index0 = i - 1,
    revindex = n - i + 1,
    revindex0 = n - i,
    first = i == 1,
    last = i == n,
    length = n,
    previtem = values[i - 1],
    nextitem = values[i + 1],
    cycle = cycle,
  })
end

local make = {}

function make.text(item)
  return function(_, out)
    out[#out + 1] = item.text
  end
end

function make.print(item)
  return function(scope, out)
    scope[STATE].line = item.line
    out[#out + 1] = pyvalue.str(item.value(scope))
  end
end

make["break"] = function()
  return function()
    return "break"
  end
end

make["continue"] = function()
  return function()
    return "continue"
  end
end

make["if"] = function(item, read_block)
  local branches, otherwise = {}, {}
  local current = item
  repeat
    local block, stop = read_block("elif", "else", "endif")
    if current.kind == "else" then
      otherwise = block
    else
      local line, condition = current.line, current.condition
      branches[#branches + 1] = { line = line, condition = condition, block = block }
    end
    current = stop
  until current.kind == "endif"
  return function(scope, out)
    for _, branch in ipairs(branches) do
      scope[STATE].line = branch.line
      if truth(branch.condition(scope)) then
        return run(branch.block, scope, out)
      end
    end
    return run(otherwise, scope, out)
  end
end

make["for"] = function(item, read_block)
  local body, stop = read_block("else", "endfor")
  local otherwise = stop.kind == "else" and read_block("endfor") or {}
  return function(scope, out)
    scope[STATE].line = item.line
    local values = loop_values(item, scope)
    for i = 1, #values do
      local inner = child(scope)
      inner.loop = loop_variable(values, i)
      assign(inner, item.targets, values[i])
      if run(body, inner, out) == "break" then
        break
      end
    end
    if #values == 0 then
      return run(otherwise, scope, out)
    end
  end
end

function make.set(item, read_block)
  if item.object then
    return function(scope)
      scope[STATE].line = item.line
      local object = scope[item.object]
      if kind(object) ~= "namespace" then
        fail(scope, ("cannot set an attribute of '%s', which is no namespace"):format(item.object))
      end
      object[item.attribute] = item.value(scope)
    end
  elseif item.value then
    return function(scope)
      scope[STATE].line = item.line
      assign(scope, item.targets, item.value(scope))
    end
  end
  local block = read_block("endset")
  return function(scope)
    local inner = {}
    run(block, child(scope), inner)
    assign(scope, item.targets, table.concat(inner))
  end
end

function make.macro(item, read_block)
  local block = read_block("endmacro")
  return function(scope)
    scope[item.name] = function(_, args, named)
      local inner, out = child(scope), {}
      for i, parameter in ipairs(item.parameters) do
        local value = args[i]
        if value == nil then
          value = named[parameter.name]
        end
        if value == nil then
          value = parameter.default and parameter.default(inner)
            or pyvalue.undefined(("parameter '%s' was not provided"):format(parameter.name))
        end
        inner[parameter.name] = value
      end
      run(block, inner, out)
      return table.concat(out)
    end
  end
end

function make.generation(_, read_block)
  local block = read_block("endgeneration")
  return function(scope, out)
    return run(block, scope, out)
  end
end

local function nest(items)
  local at = 0
  local function read_block(...)
    local ends, opened, block = {}, items[at], {}
    for _, spelling in ipairs({ ... }) do
      ends[spelling] = true
    end
    while true do
      at = at + 1
      local item = items[at]
      if not item then
        if opened then
          local message = "chat template, line %d: '%s' has no end"
          error(message:format(opened.line, opened.kind), 0)
        end
        return block
      elseif ends[item.kind] then
        return block, item
      elseif make[item.kind] then
        block[#block + 1] = make[item.kind](item, read_block)
      elseif item.kind ~= "comment" then
        local message = "chat template, line %d: '%s' stands alone"
        error(message:format(item.line, item.kind), 0)
      end
    end
  end
  return read_block()
end

-- ---- the module ----

---@class liger.Template
---@field _block function[]
local Template = {}
Template.__index = Template

--- Renders the template; raises what it raises, with the line. Values may be plain Lua tables: one
--- with a first entry is a list, an empty one a dictionary, and the keys of dictionaries come in a
--- fixed order (`pyvalue.decode` keeps that of a JSON text).
---@param variables table<string, any>
---@return string
function Template:render(variables)
  local scope = setmetatable({ [STATE] = { line = 1 } }, { __index = library.globals })
  for key, value in pairs(variables) do
    scope[key] = value
  end
  local out = {}
  run(self._block, scope, out)
  return table.concat(out)
end

--- Reads a template; raises what cannot be read, with the line.
---@param source string
---@return liger.Template
function M.compile(source)
  local items = read_items((source:gsub("\r\n?", "\n"):gsub("\n$", "")))
  trim(items)
  return setmetatable({ _block = nest(items) }, Template)
end

return M
