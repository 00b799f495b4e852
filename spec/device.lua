-- A CUDA context beside the CPU's, for the specs that compare the two.
local ffi = require("ffi")
local cases = require("spec.case")
local helper = require("spec.helper")
local lib = require("liger.ffi")
local Tensor = require("liger.tensor")

local C = lib.C
local M = { index = tonumber(os.getenv("LIGER_CUDA_DEVICE") or 0) }

local function open()
  local file = io.open("/dev/nvidiactl", "rb")
  if not file then
    return nil, "no NVIDIA device"
  end
  file:close()
  local ctx = C.lg_context_open(M.index)
  local message = ffi.string(C.lg_error(ctx))
  return message == "" and ctx or error(message, 0)
end

local opened, gpu, why

--- The context; where there is none, one line says that the spec file is skipped.
---@param file string
function M.open(file)
  if not opened then
    opened, gpu, why = true, open()
  end
  if gpu and lib.on_cpu then
    return gpu
  end
  print(("skipped: %s: %s"):format(file, gpu and "LIGER_DEVICE is not cpu" or why))
end

function M.check(status)
  if status ~= 0 then
    error(ffi.string(C.lg_error(gpu)), 0)
  end
end

-- ---- device copies ----

local Copy = {}
Copy.__index = Copy

--- A copy of a CPU tensor on the device; `pad` elements follow each row.
function M.copy(t, pad)
  pad = pad or 0
  local bytes = Tensor.dtype_bytes[t.dtype]
  local cols = t.shape[#t.shape] or 1
  local rows = cols > 0 and t:numel() / cols or 0
  local host = ffi.new("char[?]", math.max(rows * (cols + pad) * bytes, 1), 0x7f)
  local source = ffi.cast("char *", t.raw.data)
  for r = 0, rows - 1 do
    ffi.copy(host + r * (cols + pad) * bytes, source + r * cols * bytes, cols * bytes)
  end
  local flat = ffi.new("lg_tensor")
  flat.ndim, flat.dtype, flat.device = 1, t.raw.dtype, M.index
  flat.shape[0], flat.stride[0] = rows * (cols + pad), 1
  local block = C.lg_alloc(gpu, math.max(rows * (cols + pad) * bytes, 1))
  flat.data = block.data
  M.check(C.lg_upload(gpu, host, flat))
  local raw = ffi.new("lg_tensor", t.raw)
  raw.data, raw.device = block.data, M.index
  local stride = 1
  for i = #t.shape, 1, -1 do
    raw.stride[i - 1] = stride
    stride = i == #t.shape and (cols + pad) or stride * t.shape[i]
  end
  return setmetatable({ raw = raw, flat = flat, block = block, like = t, pad = pad }, Copy)
end

function Copy:to_host()
  local t = self.like
  local bytes = Tensor.dtype_bytes[t.dtype]
  local cols = t.shape[#t.shape] or 1
  local rows = cols > 0 and t:numel() / cols or 0
  local host = ffi.new("char[?]", math.max(rows * (cols + self.pad) * bytes, 1))
  M.check(C.lg_download(gpu, self.flat, host))
  local y = Tensor.empty(t.shape, t.dtype)
  local target = ffi.cast("char *", y.raw.data)
  for r = 0, rows - 1 do
    ffi.copy(target + r * cols * bytes, host + r * (cols + self.pad) * bytes, cols * bytes)
  end
  return y
end

--- Calls an op on the device with parameters by name (CPU tensors); gives its written tensors back
-- on the CPU.
function M.call(op, values, pad)
  local args, copies = {}, {}
  for i, p in ipairs(op.params) do
    local x = values[p.name]
    if p.tensor and x then
      copies[p.name] = M.copy(x, p.tensor.strided and #x.shape > 1 and pad or 0)
      args[i] = copies[p.name].raw
    else
      args[i] = x
    end
  end
  local status = C["lg_" .. op.name](gpu, unpack(args, 1, #op.params))
  local written = {}
  if status == 0 then
    for name, copy in pairs(copies) do
      if op.tensor[name].role ~= "input" then
        written[name] = copy:to_host()
      end
    end
  end
  for _, copy in pairs(copies) do
    C.lg_free(copy.block)
  end
  M.check(status)
  return written
end

--- An op's tensors: the inputs, and outputs full of NaN.
function M.poisoned(op, inputs, dtype)
  local values = {}
  for name, x in pairs(inputs) do
    local t = op.tensor[name]
    values[name] = t and t.role ~= "input" and helper.to(x, x.dtype) or x
  end
  for _, t in ipairs(op.tensors) do
    if t.role == "output" and not values[t.name] then
      local y = cases.output(op, t, inputs, dtype)
      y:fill_(t.accumulate and 0 or (y.dtype == "i32" or y.dtype == "i64") and -9 or 0 / 0)
      values[t.name] = y
    end
  end
  return values
end

return M
