-- Who owns bytes: storages, scopes that free what was made in them, and the policy that makes Lua
-- collect when C's memory grows. Lua sees a few dozen bytes a tensor, so the collector alone would
-- let memory fill up; the byte counts live in C.
local ffi = require("ffi")
local lib = require("liger.ffi")

local C, ctx, stats = lib.C, lib.ctx, lib.stats

local M = {}

local MIB = 2 ^ 20
local HEADROOM = 32 * MIB -- bytes that may pile up unreachable before a collection

local limit = HEADROOM -- live bytes at which Lua collects
local pool = {} -- parked blocks by size
local parked_bytes = 0
local most = 0 -- the most live bytes that an allocation has made
local owners = setmetatable({}, { __mode = "k" }) -- storage -> what it is for, where that is known
local scope -- the innermost open scope: { n = count, outer = scope, storages = weak list }
local weak = { __mode = "v" }
local recorded -- blocks by size, released while a graph is recorded: its own, not the pool's

---@class liger.Storage
---@field block ffi.cdata*|nil  nil once released, and for memory that someone else owns
---@field bytes integer
---@field dead boolean|nil    released: its tensors can no longer be used
---@field kept boolean|nil    outlives its scope
---@field holds integer|nil   gradients that share it, see autograd.lua
---@field mirror ffi.cdata*|true|nil  the host's copy of what was staged, until something writes
---   there; true on the CPU, where it is the storage itself
---@field counted table|nil   what head.lua counted of the mirror

-- Sizes are rounded to an eighth of a power of two, so that batches of nearly the same length share
-- blocks.
local function round_up(bytes)
  if bytes <= 512 then
    return math.ceil(bytes / 64) * 64
  end
  local _, exponent = math.frexp(bytes - 1)
  local step = 2 ^ (exponent - 4)
  return math.ceil(bytes / step) * step
end

--- Gives parked blocks back to the system.
function M.trim()
  for bytes, list in pairs(pool) do
    for i = 1, #list do
      C.lg_free(ffi.gc(list[i], nil))
    end
    pool[bytes] = nil
  end
  parked_bytes = 0
end

-- Collects until nothing more comes back, then sets the next limit.
local function collect()
  collectgarbage()
  collectgarbage()
  limit = math.max(HEADROOM, stats.live_bytes * 1.4 + HEADROOM)
end

--- Says what a storage is for: "weights", "gradients", "optimiser" or "KV cache". What nobody
--- claims counts as activations.
---@param storage liger.Storage
---@param owner string
function M.claim(storage, owner)
  owners[storage] = owner
end

--- Live bytes by owner.
---@return table<string, number>
function M.by_owner()
  local sums = { activations = stats.live_bytes }
  for storage, owner in pairs(owners) do
    if storage.block then
      sums[owner] = (sums[owner] or 0) + storage.bytes
      sums.activations = sums.activations - storage.bytes
    end
  end
  sums.scratch = stats.scratch_bytes
  return sums
end

-- The operator that asks, from the names of the generated functions.
local function asking_op()
  for level = 3, 20 do
    local info = debug.getinfo(level, "S")
    local name = info and info.source:match("^=ops%.(.+)$")
    if name or not info then
      return name
    end
  end
end

local ADVICE = "what would fit: fewer tokens at once (micro_tokens), a smaller cache "
  .. "(cache_bytes), layers that are recomputed (model.checkpointing), or --dtype bf16"

local function live_text()
  local sums, parts = M.by_owner(), {}
  for _, owner in ipairs({
    "weights", "gradients", "optimiser", "activations", "KV cache", "scratch",
  }) do
    if (sums[owner] or 0) > 0 then
      parts[#parts + 1] = ("%s %.1f"):format(owner, sums[owner] / MIB)
    end
  end
  return ("%.1f MiB live (%s MiB)"):format(stats.live_bytes / MIB, table.concat(parts, ", "))
end

--- The text of an allocation that failed: who asked, what lives, what would fit.
---@param bytes integer
---@return string
function M.shortage(bytes)
  return ("out of memory: %s wanted %.1f MiB with %s; %s"):format(
    asking_op() or "a tensor", bytes / MIB, live_text(), ADVICE
  )
end

-- An operator that found no room for its scratch: what lies parked here is given back, so that a
-- smaller batch may fit after it.
function lib.shortage(message)
  local text = ("out of memory: %s: %s, with %s; %s"):format(
    asking_op() or "the device", message, live_text(), ADVICE
  )
  if not recorded then
    M.trim()
  end
  return text
end

-- The storage of a block, known to the open scope.
local function hand_out(block, bytes)
  local storage = { block = block, bytes = bytes }
  if scope then
    local n = scope.n + 1
    scope.n = n
    scope.storages[n] = storage
  end
  return storage
end

local function park(block, bytes)
  C.lg_park(block)
  local list = pool[bytes]
  if not list then
    list = {}
    pool[bytes] = list
  end
  list[#list + 1] = block
  parked_bytes = parked_bytes + bytes
end

--- A storage of at least `bytes`, not initialised.
---@param bytes integer
---@return liger.Storage
function M.alloc(bytes)
  bytes = round_up(bytes)
  local list = pool[bytes]
  -- What an earlier part of a recording released serves its later ones, in replays too.
  local block = recorded and recorded[bytes] and table.remove(recorded[bytes])
  if block then
    return hand_out(block, bytes)
  end
  block = list and list[#list]
  if block then
    list[#list] = nil
    parked_bytes = parked_bytes - bytes
    C.lg_unpark(block)
  else
    if stats.live_bytes + bytes > limit and not recorded then
      collect()
    end
    most = math.max(most, stats.live_bytes + bytes)
    -- A step's blocks lie parked between steps: together with what lives, as much as once lived.
    if parked_bytes + stats.live_bytes > 1.25 * most + HEADROOM and not recorded then
      M.trim()
    end
    block = C.lg_alloc(ctx, bytes)
    if block == nil and not recorded then
      M.trim()
      collect()
      block = C.lg_alloc(ctx, bytes)
    end
    if block == nil then
      lib.raise(M.shortage(bytes))
    end
    block = ffi.gc(block, C.lg_free)
  end
  return hand_out(block, bytes)
end

--- Gives a storage back at once. Its tensors become unusable.
---@param storage liger.Storage
function M.release(storage)
  local block = storage.block
  if not block then
    return
  end
  storage.block = nil
  storage.dead = true
  if not recorded then
    return park(block, storage.bytes)
  end
  recorded[storage.bytes] = recorded[storage.bytes] or {}
  table.insert(recorded[storage.bytes], block)
end

--- Opens a scope: what is allocated from here on is released when it closes.
---@return table scope
function M.open_scope()
  scope = { n = 0, outer = scope, storages = setmetatable({}, weak) }
  return scope
end

--- Closes a scope and those opened inside it that are still open.
---@param closing table  what open_scope returned
function M.close_scope(closing)
  local open = scope
  while open and open ~= closing do
    open = open.outer
  end
  if not open then
    return
  end
  repeat
    local inner = scope
    scope = inner.outer
    for i = 1, inner.n do
      local storage = inner.storages[i]
      if storage and not storage.dead then
        if not storage.kept then
          M.release(storage)
        elseif type(storage.kept) == "number" then
          -- Returned from the scope: it lives on in the one around.
          storage.kept = nil
          if scope then
            scope.n = scope.n + 1
            scope.storages[scope.n] = storage
          end
        end
      end
    end
  until inner == closing
end

-- Closes a scope whose function returned the values; their tensors live on.
local function close_returning(opened, ...)
  local returned = {}
  for i = 1, select("#", ...) do
    local value = select(i, ...)
    local storage = type(value) == "table" and value.storage
    if storage and not storage.kept then
      storage.kept = 1
      returned[#returned + 1] = storage
    end
  end
  M.close_scope(opened)
  for _, storage in ipairs(returned) do
    storage.kept = nil -- also where it was made outside: it stays in its own scope
  end
  return ...
end

--- Runs fn(...) and frees what it made, except the tensors it returns and those kept.
---@param fn function
---@return any ...  what fn returned
function M.scope(fn, ...)
  return close_returning(M.open_scope(), fn(...))
end

--- Closes every open scope and gives up a recording, after an error left them open.
function M.reset()
  if recorded and not lib.on_cpu then
    local out = ffi.new("lg_graph *[1]")
    if C.lg_graph_end(ctx, out) == 0 then
      C.lg_graph_free(out[0])
    end
  end
  recorded = nil
  collectgarbage("restart")
  while scope do
    M.close_scope(scope)
  end
end

--- Opens a scope whose memory will belong to a recording: nothing of it goes back to the pool, and
--- Lua collects nothing meanwhile, since a free would be recorded too.
---@return table scope
function M.open_recording()
  collectgarbage("stop")
  recorded = {}
  scope = { n = 0, outer = scope, storages = {} }
  return scope
end

--- Closes a recording's scope.
---@return table kept  everything that was allocated in it: alive as long as this is, or until
---   release_recording
function M.close_recording(closing)
  local kept = { storages = closing.storages, blocks = recorded }
  for i = 1, closing.n do
    closing.storages[i].kept = true
  end
  scope, recorded = closing.outer, nil
  collectgarbage("restart")
  return kept
end

--- Gives a recording's memory back at once.
---@param kept table  what close_recording returned
function M.release_recording(kept)
  for _, storage in ipairs(kept.storages) do
    M.release(storage)
  end
  for bytes, list in pairs(kept.blocks) do
    for _, block in ipairs(list) do
      park(block, bytes)
    end
  end
  kept.storages, kept.blocks = {}, {}
end

--- True while a scope is open.
function M.in_scope()
  return scope ~= nil
end

--- Bytes handed out, their peak, bytes held from the system, and how often the host waited for the
--- device (on the CPU: how often it read what an op made).
---@return { live: number, peak: number, reserved: number, syncs: integer }
function M.stats()
  return {
    live = stats.live_bytes, peak = stats.peak_bytes, reserved = stats.reserved_bytes,
    syncs = stats.syncs,
  }
end

--- Bytes that an allocation could still get: the device's, and those parked here.
---@return number
function M.available()
  return C.lg_available_bytes(ctx) + parked_bytes
end

--- The next peak counts from what is live now.
function M.reset_peak()
  C.lg_stats_reset_peak(ctx)
end

return M
