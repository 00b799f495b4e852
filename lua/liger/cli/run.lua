-- liger run: finds a recipe, gives it its command line, and sees that its runs are finished however
-- it ends.
local device = require("liger.device")
local options = require("liger.train.options")

local M = {}

M.help = [[
usage: liger run FILE [--key value ...]

Runs a recipe or any Lua file. FILE is a path, or the name of a recipe that comes with liger.
`liger run FILE --help` shows a recipe's own options.

  liger run recipes/sft.lua --model SmolLM2-135M --data chats.jsonl --learning-rate 1e-5
  liger run recipes/sft.lua --processes 2
  liger run grpo --help
]]

local function exists(path)
  local file = io.open(path, "rb")
  local readable = file and file:read(0) -- nil for a folder and for an empty file
  local size = file and file:seek("end")
  if file then
    file:close()
  end
  return readable ~= nil or size == 0
end

-- The file that a name means: a path, or a recipe of the installation.
local function find(name)
  local has_sys, sys = pcall(require, "liger.sys")
  local tries = { name, name .. ".lua" }
  if has_sys then
    for _, folder in ipairs({ sys.data .. "/", sys.data .. "/recipes/" }) do
      tries[#tries + 1] = folder .. name
      tries[#tries + 1] = folder .. name .. ".lua"
    end
  end
  for _, path in ipairs(tries) do
    if exists(path) then
      return path
    end
  end
end

--- Globals of scripts: Lua's own, `liger` and `fn`, which are loaded when first used.
function M.environment()
  local env = setmetatable({}, {
    __index = function(t, key)
      local value = _G[key]
      if value == nil and (key == "liger" or key == "fn") then
        value = require(key == "liger" and "liger" or "liger.fn")
        t[key] = value
      end
      return value
    end,
  })
  return env
end

local function finish_runs(failed)
  local run = package.loaded["liger.train.run"]
  return run and run.finish_all(failed)
end

-- Runs are finished where the error is raised, so that the live line ends before the message. The
-- traceback of that place follows the message, which is printed up to its first line unless
-- --traceback was given.
local function on_error(problem)
  local described = type(problem) == "table" and problem or { message = tostring(problem) }
  pcall(finish_runs, true)
  return {
    code = described.code,
    message = described.message and described.message .. "\n" .. debug.traceback("", 2),
  }
end

--- Calls a chunk as a script with `env` as its globals.
---@return integer status  130 when a run was interrupted
function M.call(chunk, env, ...)
  local ok, problem = xpcall(setfenv(chunk, env), on_error, ...)
  if not ok then
    if problem.code == 0 then
      return 0
    end
    error(problem, 0)
  end
  return finish_runs() and 130 or 0
end

-- With --processes N, unless something started this as one of several already: lets mpirun start it
-- N times, and gives its exit status.
local function launch(words)
  local count, quiet
  for i, word in ipairs(words) do
    if word == "--help" or word == "-h" then
      return
    end
    quiet = quiet or word == "--quiet"
    count = word == "--processes" and words[i + 1] or word:match("^%-%-processes=(.*)$") or count
  end
  count = tonumber(count)
  if not count or count < 2 or count % 1 ~= 0 or device.size > 1 then
    return -- config.new says what is wrong
  end
  -- The processes share the cores by themselves (device.lua), and may be more than the cores.
  local command = {
    "mpirun", "--quiet", "--bind-to", "none", "--oversubscribe", "-n", ("%d"):format(count),
    _G.arg[0], unpack(_G.arg),
  }
  local sys = require("liger.sys")
  local cores = sys.num_cores()
  if count > cores and not quiet then
    io.stderr:write(("liger: --processes: %d processes share %d core%s\n"):format(
      count, cores, cores == 1 and "" or "s"
    ))
  end
  local status, message = sys.launch(command)
  if not status then
    message = ("--processes: mpirun: %s; Debian has it in openmpi-bin"):format(message)
    error({ message = message }, 0)
  end
  return status
end

---@param args string[]    what follows `run`
---@param globals string[]  options that stood before it
function M.main(args, globals)
  local name = args[1]
  if name == "--help" or name == "-h" then
    io.write(M.help)
    return 0
  elseif not name then
    options.usage_error("run: no file; `liger run --help`")
  elseif name:sub(1, 1) == "-" then
    options.usage_error(("run: the file comes first, got %s; `liger run --help`"):format(name))
  end
  local path = find(name)
  if not path then
    error({ message = ("%s: no such file"):format(name), code = 1 }, 0)
  end
  local chunk, message = loadfile(path)
  if not chunk then
    error({ message = message, code = 1 }, 0)
  end
  local rest = {}
  for _, word in ipairs(globals) do
    rest[#rest + 1] = word
  end
  for i = 2, #args do
    rest[#rest + 1] = args[i]
  end
  local status = launch(rest)
  if status then
    return status
  end
  require("liger.train.config").set_command({
    recipe = path,
    args = rest,
    text = "liger run " .. table.concat(args, " "),
  })
  _G.arg = rest
  _G.arg[0] = path
  return M.call(chunk, M.environment(), unpack(rest))
end

return M
