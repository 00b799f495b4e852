-- The command line of the program: which command, the options that stand before it, help. Commands
-- are loaded when called, so that a script starts at once.
local device = require("liger.device")
local options = require("liger.train.options")

local M = {}

local help = [[
usage: liger [COMMAND] [options]

  liger                          the prompt
  liger run FILE [--key value]   run a recipe; `liger FILE.lua` is the same
  liger generate MODEL PROMPT    text from a model
  liger score MODEL TEXT         log-probability and entropy of each token
  liger info MODEL               what a model is
  liger -e CODE                  run a line of Lua
  liger help COMMAND             more about one; --help after it does the same
  liger --version

Options for every command, before or after it:
  --threads N    CPU threads of a process; 0: all cores
  --seed N       seed of all random numbers
  --dtype NAME   of a command's or recipe's weights: f32 or bf16
  --device NAME  auto (a GPU when there is one), cpu or cuda:N
  --traceback    where an error comes from

In the environment: LIGER_DEVICE is what --device is by default, LIGER_TRACEBACK=1 is --traceback.

  liger run recipes/grpo.lua --help
  liger generate models/SmolLM2-135M "The capital of France is" --greedy
]]

local modules = {
  run = "liger.cli.run",
  generate = "liger.cli.generate",
  score = "liger.cli.score",
  info = "liger.cli.info",
}
local names = { "run", "generate", "score", "info", "help" }
local global_options = { threads = true, seed = true, dtype = true, device = true }

-- The environment of the prompt and of -e: everything of liger by its own name, loaded when first
-- used, then Lua's globals.
local function environment()
  local liger = require("liger")
  local known = {} -- for completion
  for name in pairs(_G) do
    known[#known + 1] = name
  end
  for _, name in ipairs(getmetatable(liger).__names) do
    known[#known + 1] = name
  end
  return setmetatable({ liger = liger }, {
    __names = known,
    __index = function(_, name)
      local value = liger[name]
      if value == nil then
        value = _G[name]
      end
      return value
    end,
  })
end

local function take_globals(args)
  local taken, i = {}, 1
  while args[i] do
    local name, value = args[i]:match("^%-%-(%a+)(.*)$")
    if not global_options[name] or not value:match("^=") and value ~= "" then
      break
    end
    taken[#taken + 1] = args[i]
    i = i + 1
    if value == "" and args[i] then
      taken[#taken + 1] = args[i]
      i = i + 1
    end
  end
  local rest = {}
  for k = i, #args do
    rest[#rest + 1] = args[k]
  end
  return taken, rest
end

-- Options before -e and the prompt, where no command reads them.
local function apply_globals(taken)
  local common = options.common
  local values = options.parse({ common.threads, common.seed, common.dtype, common.device }, taken)
  for _, word in ipairs(taken) do
    if word:match("^%-%-dtype") then
      options.usage_error("--dtype: no model here, use load(path, { dtype = NAME })")
    end
  end
  if #taken > 0 then
    require("liger.ffi").set_threads(values.threads)
    require("liger.fn").manual_seed(values.seed)
  end
end

local function show_help(name)
  if name and not modules[name] then
    local near = options.nearest(name, names)
    options.usage_error(("help: no command %s, did you mean %s?"):format(name, near))
  end
  if name then
    return require(modules[name]).main({ "--help" }, {})
  end
  io.write(help)
  return 0
end

local function refuse_words(args, after)
  if args[after + 1] then
    options.usage_error(("%s: unexpected word after %s"):format(args[after + 1], args[after]))
  end
end

-- Options may follow the code too.
local function evaluate(args, taken)
  local code = args[2]
  if not code then
    options.usage_error("-e: no value, wanted Lua code")
  end
  for i = 3, #args do
    taken[#taken + 1] = args[i]
  end
  apply_globals(taken)
  local chunk, message = loadstring(code, "=-e")
  if not chunk then
    error({ message = message, code = 1 }, 0)
  end
  return require("liger.cli.run").call(chunk, environment())
end

local function is_script(word)
  if word:find("%.lua$") then
    return true
  end
  local file = word:find("/", 1, true) and io.open(word, "rb")
  if file then
    file:close()
  end
  return file and true or false
end

-- The device is chosen before anything opens it, wherever the option stands.
local function choose_device(arg)
  for i, word in ipairs(arg) do
    local name = word == "--device" and arg[i + 1] or word:match("^%-%-device=(.*)$")
    if name then
      options.check_device(name)
      device.name = name
    end
  end
end

local function main(arg)
  choose_device(arg)
  local taken, args = take_globals(arg)
  local word = args[1]
  if not word then
    apply_globals(taken)
    require("liger.cli.repl").run(environment())
    return 0
  elseif word == "--help" or word == "-h" or word == "help" then
    refuse_words(args, math.max(math.min(#args, 2), 1))
    return show_help(args[2])
  elseif word == "--version" or word == "-v" then
    refuse_words(args, 1)
    print("liger " .. require("liger.sys").version)
    return 0
  elseif word == "-e" then
    return evaluate(args, taken)
  elseif modules[word] then
    table.remove(args, 1)
    return require(modules[word]).main(args, taken)
  elseif word:sub(1, 1) == "-" then
    options.usage_error(("%s: unknown option; `liger --help`"):format(word))
  elseif is_script(word) then
    return require("liger.cli.run").main(args, taken)
  end
  local near = options.nearest(word, names)
  options.usage_error(("no command %s, did you mean %s?"):format(word, near))
end

--- Runs the program. Of several processes one that fails ends the others, and all but the first say
--- which they are.
---@param arg string[]
---@return integer status
function M.main(arg)
  if device.size == 1 then
    return main(arg)
  end
  local ok, result = pcall(main, arg)
  if ok then
    return result
  end
  local problem = type(result) == "table" and result or { message = tostring(result) }
  local loaded, ranks = pcall(require, "liger.ranks")
  if loaded then
    ranks.fail(problem.code or 1)
  end
  if device.rank > 0 then
    problem.message = ("process %d: %s"):format(device.rank, problem.message)
  end
  error(problem, 0)
end

return M
