-- The processes that train together, each with all weights and a share of every batch. They are
-- joined at the first call that needs the others; a single process needs nothing.
--
-- All processes make the same calls in the same order: what they compute from the same data is the
-- same everywhere, and what differs goes through here. Sums are in the order of the processes, so
-- each has the same bits.
local ffi = require("ffi")
local device = require("liger.device")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local C = lib.C

local M = {
  rank = device.rank, -- from 0
  size = device.size,
  is_main = device.rank == 0, -- it prints, and writes files
}

local comm -- once joined
local shared = M.size == 1 -- share() was called

local function joined()
  if not comm then
    local out = ffi.new("lg_comm *[1]")
    lib.check(C.lg_comm_open(lib.ctx, out))
    comm = ffi.gc(out[0], C.lg_comm_close)
    if comm.size ~= M.size or comm.rank ~= M.rank then
      local text = "ranks: MPI says process %d of %d, wanted %d of %d as started: "
        .. "by Open MPI's mpirun, or srun --mpi=pmix"
      lib.raise(text:format(comm.rank, comm.size, M.rank, M.size))
    end
  end
  return comm
end

--- Notes that this process ends with an exit status: the others end with it.
---@param status integer
function M.fail(status)
  C.lg_comm_fail(comm, M.rank, status)
end

-- ---- what differs between processes ----

local num_bytes = ffi.new("int64_t[?]", M.size)

-- The text of each process, in order.
local function gather_texts(text)
  local all, list, at = ffi.new("const char *[1]"), {}, 0
  lib.check(C.lg_comm_gather(lib.ctx, joined(), text, #text, all, num_bytes))
  for r = 0, M.size - 1 do
    local n = tonumber(num_bytes[r])
    list[r + 1] = ffi.string(all[0] + at, n)
    at = at + n
  end
  return list
end

--- The value of each process, in order: numbers, texts, booleans and tables of these.
---@generic T
---@param value T
---@return T[]
function M.gather(value)
  if M.size == 1 then
    return { value }
  end
  local buffer, list = require("string.buffer"), {}
  for r, text in ipairs(gather_texts(buffer.encode(value))) do
    list[r] = buffer.decode(text)
  end
  return list
end

--- The first process's value.
---@generic T
---@param value T
---@return T
function M.broadcast(value)
  if M.size == 1 then
    return value
  end
  local buffer = require("string.buffer")
  return buffer.decode(gather_texts(M.is_main and buffer.encode(value) or "")[1])
end

--- Returns once all processes have come to it.
function M.barrier()
  M.gather(true)
end

--- Whether it is true in any process.
---@param value boolean
---@return boolean
function M.any(value)
  for _, other in ipairs(M.gather(value and true or false)) do
    value = value or other
  end
  return value
end

--- Overwrites each tensor with the sum of those in its place over the processes, through the host's
--- memory. Many at once are far quicker than one by one.
---@param list liger.Tensor[]  dense, all of one dtype: f32, f64 or i64
function M.sum_all(list)
  if M.size > 1 then
    local raw = ffi.new("lg_tensor *[?]", #list)
    for i, t in ipairs(list) do
      raw[i - 1] = Tensor.to_write(t)
    end
    lib.check(C.lg_comm_sum(lib.ctx, joined(), raw, #list))
  end
end

--- The sum over the processes: of a number; of a tensor that sum_all() takes, which is overwritten;
--- of tables, number by number, where one that a process lacks is 0.
---@generic T: number|liger.Tensor|table
---@param x T
---@return T
function M.sum(x)
  if M.size == 1 then
    return x
  elseif Tensor.is(x) then
    M.sum_all({ x })
    return x
  end
  local function add(a, b)
    if type(b) ~= "table" then
      return (a or 0) + b
    end
    a = a or {}
    for key, value in pairs(b) do
      a[key] = add(a[key], value)
    end
    return a
  end
  local total
  for _, value in ipairs(M.gather(x)) do
    total = add(total, value)
  end
  return total
end

--- Raises where a tensor is not the same in all processes, as far as the sum of its squares tells.
---@param parameters liger.Parameter[]
function M.check_same(parameters)
  if M.size == 1 then
    return
  end
  local squares = Tensor.empty({ #parameters }, "f64")
  for i, p in ipairs(parameters) do
    ops.raw.sum_squares(p.tensor, squares:row(i))
  end
  local texts = gather_texts(ffi.string(squares:read(), 8 * #parameters))
  for i, p in ipairs(parameters) do
    for r = 2, M.size do
      if texts[r]:sub(8 * i - 7, 8 * i) ~= texts[1]:sub(8 * i - 7, 8 * i) then
        lib.raise(("ranks: %s is not the same in processes 0 and %d"):format(p.name, r - 1))
      end
    end
  end
end

-- ---- shares ----

--- This process's share of a list, a run of it; of a short one it may be empty.
---@generic T
---@param list T[]
---@return T[]
---@return integer before  entries of the list in front of it
function M.share(list)
  if M.size == 1 then
    return list, 0
  end
  shared = true
  local first = math.floor(#list * M.rank / M.size)
  local y = {}
  for i = first + 1, math.floor(#list * (M.rank + 1) / M.size) do
    y[#y + 1] = list[i]
  end
  return y, first
end

--- Raises where nothing was ever shared: all processes would count the same batch.
function M.check_shared()
  if not shared then
    lib.raise(
      ("ranks: no batch was shared among %d processes, wanted pack.split or ranks.share"):format(
        M.size
      )
    )
  end
end

--- The lists of all processes end to end: undoes share().
---@generic T
---@param list T[]
---@return T[]
function M.join(list)
  if M.size == 1 then
    return list
  end
  local y = {}
  for _, part in ipairs(M.gather(list)) do
    for _, value in ipairs(part) do
      y[#y + 1] = value
    end
  end
  return y
end

return M
