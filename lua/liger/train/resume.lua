-- Which checkpoint --resume means, and whether a command goes on from it with the same bits: the
-- options that were not given are the checkpoint's, and one that differs is refused.
local cjson = require("cjson")
local checkpoint = require("liger.train.checkpoint")
local files = require("liger.file")
local options = require("liger.train.options")

local M = {}

-- Options of the process or of the folder, which each command says anew.
local OWN = { out = true, resume = true, quiet = true, device = true, threads = true }
-- The checkpoint's where nothing is said; another value changes no step.
local FREE = { save = true, save_steps = true, save_total_limit = true }
local MAY_GROW = { max_steps = true, num_train_epochs = true }

local function refuse(form, ...)
  options.usage_error("--resume: " .. form:format(...))
end

-- ---- which ----

local function broken_text(broken)
  local c = broken[1]
  return ("%s is not whole: %s"):format(c.folder, c.problem)
end

-- A checkpoint that was named itself: it must be the newest where the run goes on in its folder.
local function open_one(folder, run, out)
  local problem = checkpoint.problem(folder)
  if problem then
    refuse("%s is not whole: %s", folder, problem)
  end
  local step = tonumber(folder:match("(%d+)$"))
  for _, c in ipairs(out == run and checkpoint.list(run) or {}) do
    if c.step > step and not checkpoint.problem(c.folder) then
      refuse("%s is newer, name that or another --out", c.folder)
    end
  end
  return { folder = folder, run = run, broken = {} }
end

-- A run that saved nothing is begun anew by its own recipe alone.
local function check_recipe(run, recipe)
  local text = files.read(run .. "/config.json")
  local ok, stored = pcall(cjson.decode, text or "{}")
  local path = ok and type(stored) == "table" and stored.recipe or ""
  local name = path:match("([^/]*)$"):gsub("%.lua$", "")
  if name ~= "" and name ~= recipe then
    refuse("%s has no checkpoint and is of the recipe %s, this is %s", run, name, recipe)
  end
end

local function open_run(run, may_be_new)
  local folder, broken = checkpoint.newest(run)
  if not folder and broken[1] then
    refuse("%s, and no older one is", broken_text(broken))
  elseif not folder and not may_be_new then
    refuse("%s has no checkpoint", run)
  end
  return { folder = folder, run = run, broken = broken }
end

-- A folder has one name, with a slash at its end and without.
local function trimmed(path)
  return (path:gsub("(.)/+$", "%1"))
end

-- The checkpoint that a value of --resume means: { folder, run, broken }, without `folder` where
-- the run's own folder has none yet.
local function find(values, given, recipe)
  local path = values.resume
  if path == "" or path == "true" then
    if not given.out then
      refuse("which run? name its folder, or --out")
    end
    local from = open_run(values.out, true)
    if not from.folder then
      check_recipe(values.out, recipe)
    end
    return from
  end
  path = trimmed(path)
  local info = files.stat(path)
  if not info or not info.is_folder then
    refuse("%s: no such folder", path)
  end
  local above, name = path:match("^(.*)/([^/]+)$")
  if (name or path):find("^checkpoint%-%d+$") then
    return open_one(path, above or ".", given.out and values.out or above or ".")
  end
  return open_run(path)
end

-- ---- whether ----

local function shown(value)
  return value == false and "none" or tostring(value)
end

-- What the checkpoint's run had for a key: as said, or as its recipe filled it in.
local function had(state, name)
  local value = state.options[name]
  if value == false and state.config[name] ~= nil then
    return state.config[name]
  end
  return value
end

local function check_option(state, name, value)
  local old = had(state, name)
  if value == state.options[name] or value == old or OWN[name] or FREE[name] then
    return
  elseif MAY_GROW[name] and type(value) == "number" and type(old) == "number" then
    if value < old then
      refuse("%s is %s, the checkpoint's run had %s: it may only grow", name, shown(value),
        shown(old))
    end
  else
    refuse("%s is %s, the checkpoint's run had %s", name, shown(value), shown(old))
  end
end

-- Takes over the options of the checkpoint, and refuses those given that would change the bits.
local function take_options(state, values, given)
  for name in pairs(state.options) do
    if values[name] == nil then
      refuse("the checkpoint's run had an option %s, this recipe has none", name)
    end
  end
  for name, value in pairs(values) do
    if state.options[name] == nil then
      refuse("%s is an option that the checkpoint's run did not have", name)
    elseif given[name] then
      check_option(state, name, value)
    elseif not OWN[name] then
      values[name] = state.options[name]
    end
  end
end

local function add_sums(sums, path)
  local info = files.stat(path)
  if not info then
    return
  elseif not info.is_folder then
    sums[path] = files.checksum(path)
    return
  end
  for _, name in ipairs(files.list(path)) do
    if name:find("^model.*%.safetensors$") or name:find("%.json$") then
      sums[path .. "/" .. name] = files.checksum(path .. "/" .. name)
    end
  end
end

--- The checksums of the files and models that the options name, so that a changed one is noticed.
---@param values table<string, any>
---@return table<string, string>
function M.inputs(values)
  local sums = {}
  for name, value in pairs(values) do
    local skip = OWN[name] or FREE[name] or type(value) ~= "string"
    for path in (skip and "" or value):gmatch("[^,]+") do
      add_sums(sums, path)
    end
  end
  return sums
end

--- Where a command goes on: reads what --resume means, and changes `values` to the checkpoint's.
--- Raises a usage error where the bits would differ.
---@param values table<string, any>   the options as parsed
---@param given table<string, boolean>  those of the command line
---@param recipe string
---@param device string               "cpu" or "cuda"
---@return { folder?: string, run: string, broken: table[], state?: table }|nil  nil: it begins anew
function M.open(values, given, recipe, device)
  if values.resume == false then
    return nil
  end
  values.out = trimmed(values.out)
  local from = find(values, given, recipe)
  values.out = given.out and values.out or from.run
  if not from.folder then
    return from
  end
  local state = checkpoint.state(from.folder)
  if state.recipe ~= recipe then
    refuse("%s is of the recipe %s, this is %s", from.folder, state.recipe, recipe)
  elseif state.device ~= device then
    refuse("the device is %s, the checkpoint's run had %s", device, state.device)
  end
  take_options(state, values, given)
  for path, sum in pairs(M.inputs(values)) do
    if state.inputs[path] ~= sum then
      refuse("%s has changed since the run began", path)
    end
  end
  from.state = state
  return from
end

return M
