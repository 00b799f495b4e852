-- A recipe's options: its table of defaults, the command line over it, and the help made from the recipe's own comments.
local options = require("liger.train.options")

local M = {}

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

local function common_keys(out)
  return {
    { name = "out", default = out, show = "runs/" .. M.recipe_name() .. "-TIME", comment = "folder of the run" },
    { name = "seed", default = 0, comment = "seed of all random numbers", allow = { min = 0, whole = true } },
    { name = "threads", default = 0, comment = "CPU threads; 0: all cores", allow = { min = 0, whole = true } },
    { name = "dtype", default = "f32", comment = "of the weights: f32 or bf16", allow = { "f32", "bf16" } },
    { name = "device", default = "auto", comment = "auto or cpu", allow = { "auto", "cpu" } },
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

-- Keys in the order of the source and their comments, from the first `config {` or `config({`. A line that is only a comment
-- goes on with the one above.
local function read_keys(lines)
  local order, comments, depth, last = {}, {}, 0, nil
  for _, line in ipairs(lines) do
    local code, comment = split_comment(line)
    if depth == 0 then
      code = code:match("config%s*%(?%s*({.*)$") or ""
    end
    local names = {}
    for part in code:gmatch("[^,]+") do
      local at = part:find("[%a_][%w_]*%s*=[^=]")
      local _, opened = part:sub(1, at or 0):gsub("{", "")
      if at and depth + opened == 1 then
        names[#names + 1] = part:match("^[%a_][%w_]*", at)
      end
      local _, opens = part:gsub("{", "")
      local _, closes = part:gsub("}", "")
      depth = depth + opens - closes
      if depth == 0 and opens + closes > 0 then
        break
      end
    end
    for _, name in ipairs(names) do
      order[#order + 1] = name
    end
    if comment and #names > 0 then
      last = names[#names]
      comments[last] = comment
    elseif comment and last and code:match("^%s*$") then
      comments[last] = comments[last] .. " " .. comment
    elseif not comment or not code:match("^%s*$") then
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

local allowed_fields = { min = true, max = true, above = true, whole = true }

local function check_constraints(defaults, constraints)
  for name, allow in pairs(constraints) do
    if defaults[name] == nil then
      error(("config: constraint for %s, which is no key"):format(tostring(name)), 3)
    end
    for field in pairs(allow) do
      if type(field) ~= "number" and not allowed_fields[field] then
        error(("config: %s: constraint %s, wanted min, max, above, whole or a list"):format(name, tostring(field)), 3)
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
      seen[name] = true
      keys[#keys + 1] = {
        name = name,
        default = defaults[name],
        comment = comments[name],
        allow = constraints[name],
      }
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

--- A recipe's options: the defaults with the command line applied. Every recipe also has `out`, `seed`, `threads`, `dtype`,
--- `device` and `quiet`; a recipe's own key of that name sets the default. Seeds the random numbers and sets the threads.
---@param defaults table<string, number|string|boolean>
---@param constraints? table<string, table>  { lr = { above = 0 }, loss = { "grpo", "dapo" } }
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
  local order, comments = {}, {}
  if lines then
    order, comments = read_keys(lines)
  end
  M.default_out = ("runs/%s-%s"):format(M.recipe_name(), os.date("%Y%m%d-%H%M%S"))
  local keys, own = recipe_keys(defaults, constraints, order, comments)
  local common, all = common_keys(M.default_out), {}
  for i, key in ipairs(keys) do
    all[i] = key
  end
  for i = #common, 1, -1 do
    local key = common[i]
    if own[key.name] then
      table.remove(common, i)
    end
  end
  for _, key in ipairs(common) do
    all[#all + 1] = key
  end
  local values, _, help = options.parse(all, command.args)
  if help then
    print_help(lines, keys, common)
    error({ code = 0 }, 0)
  elseif values.device ~= "auto" and values.device ~= "cpu" then
    options.usage_error(("--device: got %q, wanted auto or cpu"):format(values.device))
  end
  apply(values)
  return values
end

return M
