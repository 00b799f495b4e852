--- The prompt: reads chunks, evaluates them in one environment, prints values. Line editing comes
-- from `liger.sys`, which only the program has; where stdin is no terminal lines are read plainly
-- and no prompt is shown.

local ffi = require("ffi")

local repl = {}

local help = [[
An expression prints its value; a statement prints nothing.
`x = 1` stays; `local x = 1` ends with its line.
Unfinished input asks for more (`>> `). Tab completes names, `exit` or Ctrl-D leaves.
Ctrl-C clears the line or stops what runs; a compiled loop does not stop, there a second Ctrl-C
ends the program.]]

local MAX_ENTRIES = 20

-- Printing

local function show_string(s)
  return (string.format("%q", s):gsub("\\\n", "\\n"):gsub("\r", "\\r"))
end

-- A fraction that f32 holds exactly came from a tensor: digits beyond f32's say nothing.
local function show_number(x)
  if x % 1 ~= 0 and tonumber(ffi.cast("float", x)) == x then return ("%.9g"):format(x) end
  return tostring(x)
end

-- An object of a class is one line: its fields.
local function show_object(value)
  local fields = {}
  for key in pairs(value) do
    if type(key) == "string" then fields[#fields + 1] = key end
  end
  table.sort(fields)
  local text = "object with " .. table.concat(fields, ", ")
  return #text > 90 and text:sub(1, 86) .. " ..." or text
end

local function show_inner(value)
  if type(value) == "number" then return show_number(value) end
  if type(value) == "string" then return show_string(value) end
  if type(value) == "table" and not getmetatable(value) then
    return next(value) == nil and "{}" or "{...}"
  end
  local text = tostring(value)
  return text:find("\n", 1, true) and text:match("^[^\n]*") .. " ..." or text
end

local function key_order(a, b)
  if type(a) == "number" and type(b) == "number" then return a < b end
  if type(a) == type(b) then return tostring(a) < tostring(b) end
  return type(a) < type(b)
end

local function show_key(key)
  if type(key) == "string" and key:match("^[%a_][%w_]*$") then return key end
  return "[" .. show_inner(key) .. "]"
end

local function show_table(t)
  local n, out = #t, {}
  for i = 1, math.min(n, MAX_ENTRIES) do out[i] = show_inner(t[i]) end
  local keys = {}
  for key in pairs(t) do
    local in_list = type(key) == "number" and key >= 1 and key <= n and key % 1 == 0
    if not in_list then keys[#keys + 1] = key end
  end
  table.sort(keys, key_order)
  for _, key in ipairs(keys) do
    if #out == MAX_ENTRIES then break end
    out[#out + 1] = show_key(key) .. " = " .. show_inner(t[key])
  end
  local left = n + #keys - #out
  if left > 0 then out[#out + 1] = ("... %d more"):format(left) end
  if #out == 0 then return "{}" end
  local lines, line = {}, "{ "
  for i, entry in ipairs(out) do
    if #line > 2 and #line + #entry > 78 then
      lines[#lines + 1] = line:gsub(" $", "")
      line = "  "
    end
    line = line .. entry .. (i < #out and ", " or " }")
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n")
end

--- The text that the prompt prints for a value.
---@param value any
---@return string
function repl.show(value)
  if type(value) == "string" then return show_string(value) end
  if type(value) == "table" then
    local meta = getmetatable(value)
    if type(meta) ~= "table" then return show_table(value) end
    if not meta.__tostring then
      return rawget(meta, "__index") == meta and show_object(value) or show_table(value)
    end
  end
  if type(value) == "number" then return show_number(value) end
  return tostring(value)
end

-- Completion

-- The keys of a value, those that its metatable lists as `__names` (they are loaded when used), and
-- those of what the metatable indexes; where that is a function, of its `__methods`.
local function each_key(value, visit)
  for _ = 1, 8 do
    if type(value) == "table" then
      for key in next, value do
        if type(key) == "string" then visit(key, value) end
      end
    end
    local meta = type(value) ~= "cdata" and debug.getmetatable(value)
    for _, key in ipairs(type(meta) == "table" and rawget(meta, "__names") or {}) do
      visit(key, value)
    end
    value = type(meta) == "table" and rawget(meta, "__index")
    if type(value) == "function" then value = rawget(meta, "__methods") end
    if type(value) ~= "table" then return end
  end
end

--- All names that `word` may become, sorted.
---@param env table
---@param word string  a name, any number of `.field`, at most one `:method`
---@return string[]
function repl.complete(env, word)
  local path, last = word:match("^(.*[.:])([%w_]*)$")
  if not path then path, last = "", word end
  local value = env
  for name in path:gmatch("[^.:]+") do
    local ok, field = pcall(function() return value[name] end)
    if not ok or field == nil then return {} end
    value = field
  end
  local methods = path:sub(-1) == ":"
  local found, seen = {}, {}
  each_key(value, function(key, owner)
    if seen[key] or key:sub(1, #last) ~= last or not key:match("^[%a_][%w_]*$") then return end
    if key:sub(1, 1) == "_" and last == "" then return end
    if methods and type(rawget(owner, key)) ~= "function" then return end
    seen[key] = true
    found[#found + 1] = path .. key
  end)
  table.sort(found)
  return found
end

-- Evaluation

local function unfinished(message)
  return message:find("near '<eof>'$") ~= nil
end

-- A chunk from text and how many of its values to drop; or nil, message, whether more may mend it.
-- The nil in front of an expression keeps a call from being a tail call, which would lose its
-- place in errors.
local function compile(text, env)
  local chunk, why_no_value = loadstring("return nil, " .. text, "@repl")
  if chunk then return setfenv(chunk, env), 1 end
  local message
  chunk, message = loadstring(text, "@repl")
  if chunk then return setfenv(chunk, env), 0 end
  return nil, message, unfinished(message) or unfinished(why_no_value)
end

local function first_line(message)
  if type(message) == "table" and message.message then message = message.message end
  return tostring(message):match("^[^\n]*")
end

-- What an error left half-way: recording off, scopes open, the collector stopped.
local function reset()
  for _, name in ipairs({ "liger.autograd", "liger.memory" }) do
    if package.loaded[name] then package.loaded[name].reset() end
  end
end

local function report(write, dropped, ok, ...)
  if not ok then
    reset()
    write("error: ", first_line((...)), "\n")
    return
  end
  for i = 1 + dropped, select("#", ...) do
    local shown, text = pcall(repl.show, (select(i, ...)))
    write(shown and text or "error: " .. first_line(text), "\n")
  end
end

local function history_path()
  local state = os.getenv("XDG_STATE_HOME")
  local home = os.getenv("HOME")
  if not state or state == "" then
    if not home or home == "" then return nil end
    state = home .. "/.local/state"
  end
  return state .. "/liger/history", state .. "/liger"
end

-- A reader gives the next line of input, or nil and why: "eof", "cancelled".
local function plain_reader(input, write, prompts)
  return function(prompt)
    if prompts then write(prompt) end
    local line = input:read("*l")
    if line then return line end
    return nil, "eof"
  end
end

local function editing_reader(sys, C, env)
  local path, folder = history_path()
  sys.set_completion(function(word) return repl.complete(env, word) end)
  if path then sys.history_load(path) end
  return sys.readline, function(text)
    sys.history_add((text:gsub("\n", " ")))
    if path and C.lg_sys_make_folders(folder) == 0 then sys.history_save(path) end
  end
end

--- Reads and evaluates until `exit` or the end of input.
---@param env table  the globals of what is typed
---@param options? { input: file*, write: fun(...: string), interactive: boolean }  for specs
function repl.run(env, options)
  options = options or {}
  local write = options.write or function(...)
    io.stdout:write(...)
    io.stdout:flush()
  end
  local C = require("liger.ffi").C
  local interactive = options.interactive
  if interactive == nil then interactive = C.lg_sys_isatty(0) end
  local has_sys, sys = pcall(require, "liger.sys")
  local read, remember = plain_reader(options.input or io.stdin, write, interactive), nil
  local call = pcall
  if interactive and has_sys then
    read, remember = editing_reader(sys, C, env)
    call = sys.interruptible
    write("liger ", sys.version, "; `help` explains the prompt, `exit` leaves\n")
  end
  local text
  while true do
    local line, why = read(text and ">> " or "> ")
    if line then
      text = text and text .. "\n" .. line or line
      local word = text:match("^%s*(%a+)%s*$")
      if word == "exit" and rawget(env, "exit") == nil then break end
      if word == "help" and rawget(env, "help") == nil then
        write(help, "\n")
        text = nil
      elseif text:match("^%s*$") then
        text = nil
      else
        local chunk, dropped, more = compile(text, env) -- without a chunk: nil, the message
        if not more then
          if remember then remember(text) end
          text = nil
          if chunk then
            report(write, dropped, call(chunk))
          else
            report(write, 0, false, dropped)
          end
        end
      end
    elseif why == "cancelled" then
      text = nil
    else
      if text then report(write, 0, false, select(2, compile(text, env))) end
      break
    end
  end
end

return repl
