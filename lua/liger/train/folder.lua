-- A run's folder: who gets it, config.json, and the files that grow with the run.
local ffi = require("ffi")
local config_module = require("liger.train.config")
local files = require("liger.file")
local json = require("liger.data.json")
local lib = require("liger.ffi")
local options = require("liger.train.options")
local ranks = require("liger.ranks")

local C = lib.C

local M = {}

local METRIC_DIGITS = 9 -- an f32 reads back the same

-- Makes the folder and takes it: config.json is created here and nowhere else, so of two runs only
-- one gets it.
local function take_folder(folder)
  local code = C.lg_sys_make_folders(folder)
  if code ~= 0 then
    local why = ffi.string(C.lg_sys_error(code))
    error(("run: cannot make the folder %s: %s"):format(folder, why), 0)
  end
  local file, message, number = io.open(folder .. "/config.json", "wx")
  if file then
    file:close()
    return true
  elseif number ~= 17 then -- EEXIST
    error(("run: cannot write %s"):format(message), 0)
  end
  return false
end

--- The run's folder, made and taken: config.out, with a number after it where that is the default
--- and taken; that of the run to go on with.
---@param config table
---@param from? table  of config.resumed
---@return string
function M.make(config, from)
  local folder = config.out
  if from and from.run == folder and (from.folder or not take_folder(folder)) then
    return folder
  elseif from and not from.folder then
    return folder -- made just now
  elseif folder ~= config_module.default_out then
    if not take_folder(folder) then
      local text = "--out: %s holds a run, name another folder, remove it, or go on with --resume"
      options.usage_error(text:format(folder))
    end
    return folder
  end
  local number = 1
  while not take_folder(folder) do
    number = number + 1
    folder = config.out .. "-" .. number
  end
  return folder
end

---@param path string
---@return file*
function M.open_append(path)
  local file, message = io.open(path, "ab")
  if not file then
    error(("run: cannot write %s"):format(message), 0)
  end
  file:setvbuf("full", 2 ^ 16) -- a line reaches the file in one piece
  return file
end

--- Adds a line to one of the run's files.
---@param run liger.Run
---@param name string    of the file
---@param values table
function M.append(run, name, values)
  if run.resuming then
    return -- the line is there
  end
  local file = run.files[name]
  if not ranks.is_main then
    return
  end
  local ok, message = file:write(json.encode(values, METRIC_DIGITS), "\n")
  if ok then
    ok, message = file:flush()
  end
  if not ok then
    error(("run: cannot write %s/%s: %s"):format(run.folder, name, message), 0)
  end
end

local function write_config(run)
  local values = {}
  for key, value in pairs(run.config) do
    values[key] = value
  end
  local command = config_module.command()
  values.out = run.folder
  files.write(
    run.folder .. "/config.json",
    json.encode({
      recipe = command.recipe or "",
      command = command.text,
      version = run.version,
      device = ffi.string(C.lg_context_describe(lib.ctx)),
      config = values,
    }) .. "\n"
  )
end

--- Writes config.json and opens metrics.jsonl and samples.jsonl; those of a run that begins anew in
--- its folder are set aside.
---@param run liger.Run
---@param from? table  of config.resumed
function M.open_files(run, from)
  write_config(run)
  for _, name in ipairs({ "metrics.jsonl", "samples.jsonl" }) do
    if from and not from.folder then
      local path = run.folder .. "/" .. name
      os.rename(path, path .. ".old")
    end
    run.files[name] = run.open_append(name)
  end
end

--- The folder for the trained model is tried before there is anything to lose. A run that goes on
--- may find the model that it saved there itself, and saves over it.
---@param config table
---@param from? table  of config.resumed
function M.probe_save(config, from)
  local folder = config.save
  if type(folder) == "string" and folder ~= "" then
    local ok, message = files.probe_folder(folder)
    if not ok then
      options.usage_error("--save: " .. message)
    end
    local is_own = from and from.state and from.state.options.save == folder
    if not is_own and files.stat(folder .. "/config.json") then
      options.usage_error(
        ("--save: %s holds a model already, wanted a new or an empty folder"):format(folder)
      )
    end
  end
end

return M
