-- A recipe's options: its table of defaults, the command line over it, and the help made from the
-- recipe's own comments.
local device = require("liger.device")
local options = require("liger.train.options")

local M = {}

-- What new() returned: its keys, and the names of those that were given.
local told = setmetatable({}, { __mode = "k" })

---@class liger.Command
---@field recipe? string  path of the recipe
---@field args string[]   what follows it
---@field text string     the command as typed
local none = { args = {}, text = "" }
local command = none

--- Sets the command line that `new` applies; nil: there is none.
---@param new_command? liger.Command
function M.set_command(new_command)
  command = new_command or none
end

---@return liger.Command
function M.command()
  return command
end

--- The recipe's name: its file without folder and ending.
function M.recipe_name()
  local path = command.recipe
  return path and path:match("([^/]+)$"):gsub("%.lua$", "") or "run"
end

-- By the table that new() returned: its values before the recipe filled any in, and the checkpoint
-- that they go on from.
local parsed_of = setmetatable({}, { __mode = "k" })
local resumed_from = setmetatable({}, { __mode = "k" })

--- The options as the command line and the defaults have them, whatever the recipe made of them.
---@param values table  what new() returned
---@return table<string, any>
function M.parsed(values)
  return parsed_of[values] or values
end

--- The checkpoint that a run with these options goes on from, of resume.open; nil: it begins anew.
---@param values table  what new() returned
---@return table|nil
function M.resumed(values)
  return resumed_from[values]
end

local function common_keys(out)
  local show = ("runs/%s-TIME"):format(M.recipe_name())
  return {
    { name = "out", default = out, show = show, comment = "folder of the run" },
    {
      name = "save_steps", default = 500, allow = { min = 0, whole = true },
      comment = "steps between checkpoints; one more at the end; 0: at Ctrl-C",
    },
    {
      name = "save_total_limit", default = 0, allow = { min = 0, whole = true },
      comment = "newest checkpoints that stay; 0: all",
    },
    {
      name = "resume", default = false, alone = "true", allow = { also = "resume_from_checkpoint" },
      comment = "path or none: a run or a checkpoint to go on from; alone: --out. "
        .. "max_steps may grow: rates are then the longer run's",
    },
    options.common.seed,
    options.common.threads,
    options.common.dtype,
    options.common.device,
    {
      name = "processes", default = device.size, show = "1", allow = { min = 1, whole = true },
      comment = "processes of this machine that share each batch, a GPU each",
    },
    { name = "quiet", default = false, comment = "no progress" },
  }
end

-- ---- the recipe's source ----

local function read_lines(path)
  local file = path and io.open(path, "r")
  if not file then
    return nil
  end
  local lines = {}
  for line in file:lines() do
    lines[#lines + 1] = line
  end
  file:close()
  return lines
end

-- A line without its comment, strings blanked, and the comment or nil.
local function split_comment(line)
  local code, i = {}, 1
  while i <= #line do
    local c = line:sub(i, i)
    if c == '"' or c == "'" then
      local j = i + 1
      while j <= #line and line:sub(j, j) ~= c do
        j = line:sub(j, j) == "\\" and j + 2 or j + 1
      end
      code[#code + 1] = '""'
      i = j + 1
    elseif line:sub(i, i + 1) == "--" then
      return table.concat(code), line:sub(i + 2):match("^%s*(.-)%s*$")
    else
      code[#code + 1] = c
      i = i + 1
    end
  end
  return table.concat(code), nil
end

local function braces(code)
  local _, opens = code:gsub("{", "")
  local _, closes = code:gsub("}", "")
  return opens, closes
end

-- The keys that a line of a table sets, and the depth of braces after it; the line is looked at up
-- to where the table ends.
local function keys_of_line(code, depth)
  local names = {}
  for part in code:gmatch("[^,]+") do
    local at = part:find("[%a_][%w_]*%s*=[^=]")
    if at and depth + braces(part:sub(1, at)) == 1 then
      names[#names + 1] = part:match("^[%a_][%w_]*", at)
    end
    local opens, closes = braces(part)
    depth = depth + opens - closes
    if depth == 0 and closes > 0 then
      break
    end
  end
  return names, depth
end

-- Keys in the order of the source and their comments, from the first `config {` or `config({`. A
-- line that is only a comment and stands further right than the key goes on with the comment above.
local function read_keys(lines)
  local order, comments, depth, last, indent = {}, {}, 0, nil, 0
  for _, line in ipairs(lines) do
    local code, comment = split_comment(line)
    if depth == 0 then
      code = code:match("config%s*%(?%s*({.*)$") or ""
    end
    local names
    names, depth = keys_of_line(code, depth)
    for _, name in ipairs(names) do
      order[#order + 1] = name
    end
    local is_bare = code:match("^%s*$")
    if comment and #names > 0 then
      last, indent = names[#names], #line:match("^%s*")
      comments[last] = comment
    elseif comment and is_bare and last and #code > indent then
      comments[last] = comments[last] .. " " .. comment
    else
      last = nil
    end
    if depth == 0 and #order > 0 then
      break
    end
  end
  return order, comments
end

-- The comment that the file opens with.
local function first_comment(lines)
  local text = {}
  for i, line in ipairs(lines) do
    local comment = line:match("^%-%-+%s?(.*)$")
    if comment then
      text[#text + 1] = comment
    elseif not (i == 1 and line:match("^#!")) then
      break
    end
  end
  return table.concat(text, "\n")
end

-- ---- the keys ----

local allowed_fields = {
  min = true, max = true, above = true, whole = true, also = true, with = true,
  choice = true,
}

local function check_constraints(defaults, constraints)
  for name, allow in pairs(constraints) do
    if defaults[name] == nil then
      error(("config: constraint for %s, which is no key"):format(tostring(name)), 3)
    end
    for field in pairs(allow) do
      if type(field) ~= "number" and not allowed_fields[field] then
        local form = "config: %s: constraint %s, wanted min, max, above, whole, with, choice, "
          .. "also or a list"
        error(form:format(name, tostring(field)), 3)
      end
    end
  end
end

local function check_defaults(defaults)
  for name, default in pairs(defaults) do
    local kind = type(default)
    if type(name) ~= "string" or not name:match("^[%a_][%w_]*$") then
      error(("config: key %s is no name"):format(tostring(name)), 3)
    elseif kind ~= "number" and kind ~= "string" and kind ~= "boolean" then
      error(("config: %s is a %s, wanted a number, a string or a boolean"):format(name, kind), 3)
    end
  end
end

local function recipe_keys(defaults, constraints, order, comments)
  local keys, seen = {}, {}
  local function add(name)
    if defaults[name] ~= nil and not seen[name] then
      seen[name] = {
        name = name,
        default = defaults[name],
        comment = comments[name],
        allow = constraints[name],
      }
      keys[#keys + 1] = seen[name]
    end
  end
  for _, name in ipairs(order) do
    add(name)
  end
  local rest = {}
  for name in pairs(defaults) do
    rest[#rest + 1] = name
  end
  table.sort(rest)
  for _, name in ipairs(rest) do
    add(name)
  end
  return keys, seen
end

local function print_help(lines, keys, common)
  local about = lines and first_comment(lines) or ""
  io.write("usage: liger run ", command.recipe or "RECIPE", " [--key value ...]\n")
  if about ~= "" then
    io.write("\n", about, "\n")
  end
  if #keys > 0 then
    io.write("\noptions, their defaults:\n", options.columns(keys))
  end
  io.write("\nin every recipe:\n", options.columns(common))
end

local function apply(values)
  local lib = require("liger.ffi")
  if values.threads > 0 then
    lib.set_threads(values.threads)
  end
  require("liger.fn").manual_seed(values.seed)
  math.randomseed(values.seed)
end

local function resume_from(values, given)
  if values.resume ~= false then
    local kind = require("liger.ffi").on_cpu and "cpu" or "cuda"
    return require("liger.train.resume").open(values, given, M.recipe_name(), kind)
  end
end

-- The recipe's keys, those of every recipe, and both in one list. A recipe's own key of a common
-- name keeps the common one's limits.
local function all_keys(defaults, constraints, lines)
  local order, comments = {}, {}
  if lines then
    order, comments = read_keys(lines)
  end
  local keys, own = recipe_keys(defaults, constraints, order, comments)
  local common, all = {}, { unpack(keys) }
  for _, key in ipairs(common_keys(M.default_out)) do
    if own[key.name] then
      own[key.name].allow = own[key.name].allow or key.allow
    else
      common[#common + 1] = key
      all[#all + 1] = key
    end
  end
  return keys, common, all
end

--- A recipe's options: the defaults with the command line applied. Every recipe also has `out`,
--- `save_steps`, `save_total_limit`, `resume`, `seed`, `threads`, `dtype`, `device`, `processes`
--- and `quiet`; a recipe's own key of that name sets the default. Seeds the random numbers and sets
--- the threads.
---@param defaults table<string, number|string|boolean>
---@param constraints? table<string, table>  { lr = { above = 0, also = "learning_rate" },
---   loss = { "grpo", "dapo" }, delta = { with = { "loss", "grpo" } } }, see liger.options
---@return table<string, any>
function M.new(defaults, constraints)
  if type(defaults) ~= "table" then
    error(("config: options are a %s, wanted a table"):format(type(defaults)), 2)
  end
  constraints = constraints or {}
  check_defaults(defaults)
  check_constraints(defaults, constraints)
  local source = debug.getinfo(2, "S")
  local lines = read_lines(source and source.source:match("^@(.+)$") or command.recipe)
  M.default_out = ("runs/%s-%s"):format(M.recipe_name(), os.date("%Y%m%d-%H%M%S"))
  local keys, common, all = all_keys(defaults, constraints, lines)
  local values, _, help, given = options.parse(all, command.args)
  if help then
    print_help(lines, keys, common)
    error({ code = 0 }, 0)
  end
  options.check_device(values.device)
  if values.processes ~= device.size then
    options.usage_error(
      ("--processes: got %d, wanted %d as were started"):format(values.processes, device.size)
    )
  end
  given.processes = true -- by what started them
  resumed_from[values] = resume_from(values, given)
  apply(values)
  parsed_of[values] = M.merge(values)
  for name in pairs(given) do
    given[name] = values[name] ~= false or defaults[name] or nil -- `none` says nothing
  end
  told[values] = { keys = all, given = given }
  return values
end

--- Gives the options that are `false`, because nothing was said, these values. Refuses what was
--- given and has no effect beside them.
---@param values table<string, any>    what new() returned
---@param defaults table<string, any>
function M.fill(values, defaults)
  for key, default in pairs(defaults) do
    if values[key] == false then
      values[key] = default
    end
  end
  if told[values] then
    options.refuse_unread(told[values].keys, values, told[values].given)
  end
end

--- One table with the fields of all; later ones win.
---@param ... table
---@return table
function M.merge(...)
  local y = {}
  for _, t in ipairs({ ... }) do
    for key, value in pairs(t) do
      y[key] = value
    end
  end
  return y
end

--- The fields of t that are not what these defaults, which name them, say.
---@param t table
---@param defaults table<string, any>
---@return table
function M.pick(t, defaults)
  local y = {}
  for key, default in pairs(defaults) do
    if t[key] ~= default then
      y[key] = t[key]
    end
  end
  return y
end

return M
