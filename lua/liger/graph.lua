-- Recording: a function's operators are recorded once on a device and then replayed by one call,
-- without Lua and without a launch each. On the CPU the function itself is called.
local ffi = require("ffi")
local lib = require("liger.ffi")
local memory = require("liger.memory")

local C = lib.C

local M = {}

local function pack(...)
  return { n = select("#", ...), ... }
end

--- Records fn() and gives a function that does it again. fn reads and writes the same tensors every
--- time (change their values, not which tensors they are), does not wait for the device, and what
--- it returns stays where it is: each replay overwrites it. An error in fn leaves the recording
--- open and Lua's collector stopped: who goes on after it calls memory.reset(), as the prompt does.
---@param fn function
---@return function replay  returns what fn returned
function M.new(fn)
  if lib.on_cpu then
    return fn
  end
  -- Once for real: kernels are loaded, plans made, and the blocks that the recording takes lie
  -- parked.
  local warm = memory.open_scope()
  fn()
  memory.close_scope(warm)
  local scope = memory.open_recording()
  lib.check(C.lg_graph_begin(lib.ctx))
  local recording = pack(fn())
  local out = ffi.new("lg_graph *[1]")
  local status = C.lg_graph_end(lib.ctx, out)
  -- What fn made belongs to the recording: it lives as long as the replaying function does.
  recording.memory = memory.close_recording(scope)
  lib.check(status)
  recording.graph = ffi.gc(out[0], C.lg_graph_free)
  return function()
    lib.check(C.lg_graph_launch(recording.graph))
    return unpack(recording, 1, recording.n)
  end
end

return M
