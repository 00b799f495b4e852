-- The only place that declares and loads the C library. Holds its namespace for the life of the
-- program, the one context, and the way C's failures become Lua errors at the user's own line.
local ffi = require("ffi")
local abi = require("abi")
local device = require("liger.device")

local M = {}

ffi.cdef(abi.cdef)

-- libliger.so lies in the build folder above gen/abi.lua, or in lib/ beside share/ once installed.
local function library_path()
  local here = package.searchpath("abi", package.path):gsub("[^/]*$", "")
  for _, path in ipairs({ here .. "../libliger.so", here .. "../../lib/libliger.so" }) do
    local file = io.open(path, "rb")
    if file then
      file:close()
      return path
    end
  end
  return "libliger.so"
end

-- A thread that waits spins about 200 us, then sleeps: long enough for the Lua between two ops,
-- short enough to leave a busy machine's cores to others (libgomp's own default spins 15 ms, 10
-- times slower there). Read when libgomp is loaded, which is now.
ffi.cdef("int setenv(const char *name, const char *value, int overwrite);")
ffi.C.setenv("GOMP_SPINCOUNT", "4000", 0)

local C = ffi.load(library_path())
if C.lg_abi_hash() ~= abi.hash then
  error("libliger.so was built from other headers than abi.lua: rebuild it", 0)
end

-- A CUDA device shows as a node of the file system, so that a machine without one never loads
-- CUDA's libraries.
local function has_gpu()
  for _, path in ipairs({ "/dev/nvidiactl", "/dev/dxg" }) do
    local file = io.open(path, "rb")
    if file then
      file:close()
      return true
    end
  end
  return false
end

local function open(number)
  local ctx = C.lg_context_open(number)
  if ctx == nil then
    error("no memory for a context", 0)
  end
  local message = ffi.string(C.lg_error(ctx))
  if message ~= "" then
    C.lg_context_close(ctx)
    return nil, message
  end
  return ctx
end

local function open_wanted(name)
  if name == "cpu" then
    return open(C.LG_CPU)
  elseif name == "auto" then
    local ctx, message
    if has_gpu() then
      ctx, message = open(device.ordinal())
      if not ctx and device.local_size > 1 then
        error(("device: process %d: %s; --device cpu takes none"):format(device.rank, message), 0)
      elseif not ctx then
        io.stderr:write(("liger: running on the CPU: %s\n"):format(message))
      end
    end
    return ctx or open(C.LG_CPU)
  end
  local number = name == "cuda" and 0 or tonumber(name:match("^cuda:(%d+)$"))
  if not number then
    error(("device: name is %s, wanted auto, cpu or cuda:N"):format(name), 0)
  end
  local ctx, message = open(number)
  return ctx or error(message, 0)
end

M.C = C
M.ctx = open_wanted(device.name)
M.stats = C.lg_context_stats(M.ctx)
M.device = tonumber(C.lg_context_device(M.ctx))
M.on_cpu = M.device == C.LG_CPU

local function share_threads()
  C.lg_context_set_threads(M.ctx, device.share_of(tonumber(C.lg_context_threads(M.ctx))))
end
share_threads()

local own_folder = debug.getinfo(1, "S").source:gsub("ffi%.lua$", "")

-- The first stack level whose source is not the library's own.
local function user_level()
  local level = 3
  while true do
    local info = debug.getinfo(level, "S")
    if not info then
      return 0
    end
    local source = info.source
    if info.what ~= "C" and source:sub(1, 1) ~= "="
      and source:sub(1, #own_folder) ~= own_folder then
      return level - 1
    end
    level = level + 1
  end
end

--- Raises `message` at the line outside the library that led here.
---@param message string
function M.raise(message)
  error(message, user_level())
end

--- Raises the library's own message when a C call failed.
---@param status integer  an lg_status
function M.check(status)
  if status ~= 0 then
    local message = ffi.string(C.lg_error(M.ctx))
    M.raise(status == C.LG_ENOMEM and M.shortage(message) or message)
  end
end

--- The same for a call that reads or writes a file: no line of Lua is to blame.
---@param status integer
function M.check_file(status)
  if status ~= 0 then
    error(ffi.string(C.lg_error(M.ctx)), 0)
  end
end

--- The text of a C call that found no memory; memory.lua, which knows what lives, has a longer one.
function M.shortage(message)
  return message
end

--- Sets the number of CPU threads; 0 takes all cores, shared with the machine's other processes.
---@param threads integer
function M.set_threads(threads)
  if type(threads) ~= "number" or threads % 1 ~= 0 then
    M.raise(("threads: number is %s, wanted an integer"):format(tostring(threads)))
  end
  M.check(C.lg_context_set_threads(M.ctx, threads))
  if threads == 0 then
    share_threads()
  end
end

return M
