-- Recording: a function's operators are recorded once on a device and then replayed by one call,
-- without Lua and without a launch each. On the CPU the function itself is called.
local ffi = require("ffi")
local lib = require("liger.ffi")
local memory = require("liger.memory")

local C = lib.C

local M = {}

---@class liger.Graph
local Graph = {}
Graph.__index = Graph

local function pack(...)
  return { n = select("#", ...), ... }
end

--- Does again what the function did.
---@return any ...  what the function returned; a replay overwrites its tensors
function Graph:__call()
  if not self.recording then
    return self.fn()
  end
  lib.check(C.lg_graph_launch(self.recording))
  return unpack(self.results, 1, self.results.n)
end

--- Gives its memory back; it is not to be called again.
function Graph:free()
  if self.recording then
    C.lg_graph_free(ffi.gc(self.recording, nil))
    memory.release_recording(self.memory)
    self.recording, self.results = nil, nil
  end
end

--- Records fn() and gives an object that does it again when called. fn reads and writes the same
--- tensors every time (change their values, not which tensors they are), does not wait for the
--- device or bring it values from the host, and what it returns stays where it is. An error in fn
--- leaves the recording open and Lua's collector stopped: who goes on after it calls
--- memory.reset(), as the prompt does.
---@param fn function
---@return liger.Graph
function M.new(fn)
  local self = setmetatable({ fn = fn }, Graph)
  if lib.on_cpu then
    return self
  end
  -- Once for real: kernels are loaded, plans made, and the blocks that the recording takes lie
  -- parked.
  local warm = memory.open_scope()
  fn()
  memory.close_scope(warm)
  local scope = memory.open_recording()
  lib.check(C.lg_graph_begin(lib.ctx))
  self.results = pack(fn())
  local out = ffi.new("lg_graph *[1]")
  local status = C.lg_graph_end(lib.ctx, out)
  -- What fn made belongs to the recording: it lives as long as this object does.
  self.memory = memory.close_recording(scope)
  lib.check(status)
  self.recording = ffi.gc(out[0], C.lg_graph_free)
  return self
end

return M
