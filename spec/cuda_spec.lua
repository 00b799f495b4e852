-- The CUDA backend against the CPU: every operator on every size of its case, forward and backward,
-- in f32 and bf16, twice the same bits, with strided rows, and what it refuses. Runs where a CUDA
-- device is: elsewhere one line says so.
local ffi = require("ffi")
local cases = require("spec.case")
local helper = require("spec.helper")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local C = lib.C
local device = tonumber(os.getenv("LIGER_CUDA_DEVICE") or 0)

local function open()
  local file = io.open("/dev/nvidiactl", "rb")
  if not file then
    return nil, "no NVIDIA device"
  end
  file:close()
  local ctx = C.lg_context_open(device)
  local message = ffi.string(C.lg_error(ctx))
  return message == "" and ctx or nil, message
end

local gpu, why = open()
if not gpu or not lib.on_cpu then
  print("skipped: spec/cuda_spec.lua: " .. (gpu and "LIGER_DEVICE is not cpu" or why))
  return
end

local function check(status)
  if status ~= 0 then
    error(ffi.string(C.lg_error(gpu)), 0)
  end
end

-- Bounds on the largest difference over the largest magnitude, against double on the same inputs.
-- f32: the same formulas in another order. bf16: one rounding of the result is 2^-9 = 2e-3 of it, a
-- sum of rounded terms a few times that.
local VALUE = { f32 = 1e-5, bf16 = 1e-2 }
local GRADIENT = { f32 = 1e-4, bf16 = 2e-2 }

-- ---- device copies ----

local Copy = {}
Copy.__index = Copy

-- A copy of a CPU tensor on the device; `pad` elements follow each row.
local function to_device(t, pad)
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
  flat.ndim, flat.dtype, flat.device = 1, t.raw.dtype, device
  flat.shape[0], flat.stride[0] = rows * (cols + pad), 1
  local block = C.lg_alloc(gpu, math.max(rows * (cols + pad) * bytes, 1))
  flat.data = block.data
  check(C.lg_upload(gpu, host, flat))
  local raw = ffi.new("lg_tensor", t.raw)
  raw.data, raw.device = block.data, device
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
  check(C.lg_download(gpu, self.flat, host))
  local y = Tensor.empty(t.shape, t.dtype)
  local target = ffi.cast("char *", y.raw.data)
  for r = 0, rows - 1 do
    ffi.copy(target + r * cols * bytes, host + r * (cols + self.pad) * bytes, cols * bytes)
  end
  return y
end

-- Calls an op on the device with parameters by name (CPU tensors); gives its written tensors back
-- on the CPU.
local function call(op, values, pad)
  local args, copies = {}, {}
  for i, p in ipairs(op.params) do
    local x = values[p.name]
    if p.tensor and x then
      copies[p.name] = to_device(x, p.tensor.strided and #x.shape > 1 and pad or 0)
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
  check(status)
  return written
end

-- ---- the specs ----

local function poisoned(op, inputs, dtype)
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

local function compare(got, want, dtype, bounds, what)
  for name, y in pairs(got) do
    local bound = y.dtype == "i32" and 0 or bounds[dtype]
    -- A gradient may be nothing but rounding: that of one key's score is 0.
    helper.close(y, want[name], bound, what .. name, 1e-2)
  end
end

local function same(a, b, what)
  for name, y in pairs(a) do
    helper.same(y, b[name], what .. name)
  end
end

local function backward_values(op, want, up, dtype, start)
  local back = op.backward
  local values = {}
  for _, p in ipairs(back.params) do
    local base = p.name:sub(1, 1) == "d" and p.name:sub(2)
    if base and op.tensor[base] and up[base] then
      values[p.name] = up[base]
    elseif base and op.tensor[base] and want[base] and back.tensor[p.name].role == "output" then
      local t = back.tensor[p.name]
      values[p.name] = Tensor.empty(want[base].shape, cases.dtype_of(t, dtype))
        :fill_(t.accumulate and start or 0 / 0)
    elseif not (base and op.tensor[base]) then
      local x = want[p.name]
      values[p.name] = p.tensor and p.tensor.role ~= "input" and x and helper.to(x, x.dtype) or x
    end
  end
  return values
end

local function agree(op, case, shape, dtype, pad)
  local inputs = cases.inputs(op, case, shape, dtype, dtype)
  local exact = cases.inputs(op, case, shape, "f64", dtype)
  local want = cases.forward(op, exact, "f64")
  local got = call(op, poisoned(op, inputs, dtype), pad)
  compare(got, want, dtype, VALUE, "")
  same(call(op, poisoned(op, inputs, dtype), pad), got, "again, ")
  if not op.backward then
    return
  end
  local cpu = cases.forward(op, inputs, dtype)
  for name, y in pairs(got) do
    cpu[name] = y
  end
  local up, up_exact = {}, {}
  for name, dy in pairs(cases.upstream(op, want, "f64")) do
    up[name] = helper.to(dy, got[name].dtype)
    up_exact[name] = helper.to(up[name], "f64")
  end
  local names = cases.differentiable(op)
  local wanted = cases.backward(op, want, up_exact, names, "f64", { start = 1 })
  local function run()
    local written, gradients = call(op.backward, backward_values(op, cpu, up, dtype, 1), pad), {}
    for _, name in ipairs(names) do
      gradients[name] = written["d" .. name]
    end
    return gradients
  end
  local gradients = run()
  compare(gradients, wanted, dtype, GRADIENT, "d")
  same(run(), gradients, "again, d")
end

describe("the CUDA backend", function()
  for _, op in ipairs(cases.ops()) do
    local case = cases.of(op.name)
    if case then
      for _, dtype in ipairs({ "f32", "bf16" }) do
        for _, shape in ipairs(case.shapes) do
          local size = cases.text(shape)
          it(("%s %s: agrees with the CPU, %s"):format(op.name, dtype, size), function()
            agree(op, case, shape, dtype)
          end)
        end
      end
      it(op.name .. ": reads and writes strided rows", function()
        agree(op, case, case.shapes[#case.shapes], "f32", 8)
        agree(op, case, case.shapes[1], "bf16", 3)
      end)
    end
  end

  it("reports an id that is out of range at the next wait", function()
    local op = ops.schema.embedding
    local values = poisoned(op, {
      w = Tensor.from_table({ { 1, 2 }, { 3, 4 } }),
      ids = Tensor.from_table({ 0, 5 }, "i32"),
    }, "f32")
    helper.raises(function()
      call(op, values)
    end, "embedding: ids[1] is 5, wanted [0, 2)")
  end)
end)
