-- Chat templates: the part of Jinja that they use, with trim_blocks and lstrip_blocks on as
-- transformers renders them. template_grammar.lua reads the tags; here white space is trimmed,
-- blocks are nested, and each statement becomes a Lua function. Values are Python's (pyvalue.lua).
local grammar = require("liger.data.template_grammar")
local library = require("liger.data.template_library")
local pyvalue = require("liger.data.pyvalue")

local M = {}

local kind, truth = pyvalue.kind, pyvalue.truth
local fail = library.fail

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
    local item, next_at = grammar.tag:match(source, from, progress)
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
