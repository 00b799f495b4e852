-- Tensor: a shape, a dtype and a view of a storage. Holds no mathematics; ops.lua, autograd.lua and
-- arithmetic.lua add methods.
local ffi = require("ffi")
local lib = require("liger.ffi")
local memory = require("liger.memory")

local C = lib.C

---@class liger.Tensor
---@field shape integer[]        never changed in place
---@field dtype string           "f32", "bf16", "f16", "f64", "i32", "i64" or "u8"
---@field raw ffi.cdata*         the lg_tensor
---@field storage liger.Storage
---@field requires_grad boolean|nil
---@field grad liger.Tensor|nil
---@field grad_failed boolean|nil  the optimiser's last step was skipped for this gradient
local Tensor = {}
local methods = {}
Tensor.methods = methods
Tensor.__methods = methods -- for the prompt's completion, as __index is a function

local tensor_t = ffi.typeof("lg_tensor")
local byte_ptr = ffi.typeof("char *")

local dtype_id = { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, i32 = 4, i64 = 5, u8 = 6 }
local dtype_bytes = { f32 = 4, bf16 = 2, f16 = 2, f64 = 8, i32 = 4, i64 = 8, u8 = 1 }
local pointer = {}
for name, ctype in pairs({
  f32 = "float *",
  bf16 = "uint16_t *",
  f16 = "uint16_t *",
  f64 = "double *",
  i32 = "int32_t *",
  i64 = "int64_t *",
  u8 = "uint8_t *",
}) do
  pointer[name] = ffi.typeof(ctype)
end
Tensor.dtype_bytes = dtype_bytes

function Tensor.__index(t, key)
  if type(key) == "number" then
    return methods.row(t, key)
  end
  return methods[key]
end

--- "[2,3]"
function Tensor.shape_text(shape)
  return "[" .. table.concat(shape, ",") .. "]"
end

--- True when x is a tensor.
function Tensor.is(x)
  return getmetatable(x) == Tensor
end

local function check_dtype(dtype)
  if not dtype_id[dtype] then
    lib.raise(
      ("tensor: dtype is %s, wanted f32, bf16, f16, f64, i32, i64 or u8"):format(tostring(dtype))
    )
  end
end

local function check_ndim(shape)
  if #shape > 4 then
    lib.raise(
      ("tensor: shape %s has %d dimensions, wanted at most 4"):format(
        Tensor.shape_text(shape), #shape
      )
    )
  end
end

--- A dense tensor, not initialised. The shape table is kept: do not change it.
---@param shape integer[]
---@param dtype string
---@return liger.Tensor
function Tensor.empty(shape, dtype)
  local id = dtype_id[dtype] or check_dtype(dtype)
  local ndim = #shape
  check_ndim(shape)
  local raw = tensor_t()
  local n = 1
  for i = ndim, 1, -1 do
    local size = shape[i]
    if type(size) ~= "number" or size < 0 or size % 1 ~= 0 then
      lib.raise(
        ("tensor: dimension %d is %s, wanted a whole number from 0"):format(i, tostring(size))
      )
    end
    raw.shape[i - 1] = size
    raw.stride[i - 1] = n
    n = n * size
  end
  if n * dtype_bytes[dtype] > 2 ^ 52 then
    lib.raise(("tensor: %s has too many elements"):format(Tensor.shape_text(shape)))
  end
  local storage = memory.alloc(n * dtype_bytes[dtype])
  raw.ndim = ndim
  raw.dtype = id
  raw.device = lib.device
  raw.data = storage.block.data
  return setmetatable({ shape = shape, dtype = dtype, raw = raw, storage = storage }, Tensor)
end

local function check_live(t)
  if t.storage.dead then
    lib.raise("tensor: used after its scope ended; return it from the scope or call keep()")
  end
end

-- A view: `offset` elements into t, with shape and strides (in elements; nil: dense).
function Tensor.view_of(t, offset, shape, strides)
  check_live(t)
  check_ndim(shape)
  if t.host then
    t:upload() -- a view reads and writes the device
  end
  local raw = tensor_t()
  local n = 1
  for i = #shape, 1, -1 do
    raw.shape[i - 1] = shape[i]
    raw.stride[i - 1] = strides and strides[i] or n
    n = n * shape[i]
  end
  raw.ndim = #shape
  raw.dtype = t.raw.dtype
  raw.device = t.raw.device
  raw.data = ffi.cast(byte_ptr, t.raw.data) + offset * dtype_bytes[t.dtype]
  return setmetatable({ shape = shape, dtype = t.dtype, raw = raw, storage = t.storage }, Tensor)
end

--- A tensor over memory that someone else owns; `owner` is kept alive with it.
---@param data ffi.cdata*
function Tensor.foreign(data, shape, dtype, owner)
  check_dtype(dtype)
  local storage = { bytes = 0, foreign = owner or true }
  local base = { shape = shape, dtype = dtype, storage = storage, raw = tensor_t() }
  base.raw.data = ffi.cast("void *", data)
  base.raw.dtype = dtype_id[dtype]
  base.raw.device = C.LG_CPU
  return Tensor.view_of(base, 0, shape)
end

-- Arrays on their way to or from a device. A function a dtype: a trace that calls one constructor
-- out of a table takes it for all dtypes.
local new_array = {
  f32 = function(n) return ffi.new("float[?]", n) end,
  f64 = function(n) return ffi.new("double[?]", n) end,
  bf16 = function(n) return ffi.new("uint16_t[?]", n) end,
  f16 = function(n) return ffi.new("uint16_t[?]", n) end,
  i32 = function(n) return ffi.new("int32_t[?]", n) end,
  i64 = function(n) return ffi.new("int64_t[?]", n) end,
  u8 = function(n) return ffi.new("uint8_t[?]", n) end,
}

--- A dense tensor that Lua fills through data(); its first use as an op's argument brings the
--- values to the device.
---@param shape integer[]
---@param dtype string
---@return liger.Tensor
function Tensor.stage(shape, dtype)
  local t = Tensor.empty(shape, dtype)
  if not lib.on_cpu then
    t.host = new_array[dtype](math.max(t:numel(), 1))
  else
    t.storage.mirror, t.is_mirrored = true, true -- the host knows the values: see read()
  end
  return t
end

--- Brings staged values to the device; ops do it by themselves.
---@return liger.Tensor self
function methods:upload()
  if self.host then
    lib.check(C.lg_upload(lib.ctx, self.host, self.raw))
    self.storage.mirror, self.is_mirrored, self.host = self.host, true, nil
    self.storage.counted = nil -- see head.lua: what the mirror's old values gave
  end
  return self
end

--- Makes a tensor that came from stage() writable through data() again, until its next upload.
---@return liger.Tensor self
function methods:restage()
  if not lib.on_cpu and not self.host then
    self.host = self.storage.mirror or new_array[self.dtype](math.max(self:numel(), 1))
  end
  return self
end

--- The raw tensor of one that C is about to write: the host's values are no longer its own. They
-- are known by the storage, since any view may write there.
---@param t liger.Tensor
---@return ffi.cdata*
function Tensor.to_write(t)
  t:upload()
  t.storage.mirror = nil
  return t.raw
end

--- The data as a pointer of its C type, for reading and writing from Lua: of a staged tensor, and
--- of any on the CPU. bf16 and f16 are uint16_t.
---@return ffi.cdata*
function methods:data()
  if self.storage.dead then
    lib.raise("tensor: used after its scope ended; return it from the scope or call keep()")
  end
  if self.host then
    return self.host
  elseif self.raw.device ~= C.LG_CPU then
    lib.raise("data: tensor is on the device; use read() or to_table()")
  end
  return ffi.cast(pointer[self.dtype], self.raw.data)
end

--- The values as read() gives them where the host knows them, without a wait; else nil.
---@return ffi.cdata*|nil
function methods:known()
  local mirror = self.host or self.is_mirrored and self.storage.mirror
  return mirror == true and self:data() or mirror or nil
end

--- The values of a dense tensor as an array of its C type, from 0. Waits for the device, unless the
--- values came from the host and have not changed since; on the CPU it is the data itself, and
--- counts as such a wait.
---@return ffi.cdata*
function methods:read()
  local known = self:known()
  if known then
    return known
  elseif self.raw.device == C.LG_CPU then
    if not self.storage.foreign then
      lib.stats.syncs = lib.stats.syncs + 1
    end
    return self:data()
  end
  local host = new_array[self.dtype](math.max(self:numel(), 1))
  lib.check(C.lg_download(lib.ctx, self.raw, host))
  return host
end

--- Number of elements.
function methods:numel()
  local n = 1
  for i = 1, #self.shape do
    n = n * self.shape[i]
  end
  return n
end

--- Size of dimension i, from 1; negative counts from the last.
function methods:size(i)
  return self.shape[i > 0 and i or #self.shape + 1 + i]
end

function methods:is_contiguous()
  local dense = 1
  for i = #self.shape, 1, -1 do
    if self.shape[i] > 1 and tonumber(self.raw.stride[i - 1]) ~= dense then
      return false
    end
    dense = dense * self.shape[i]
  end
  return true
end

--- The storage outlives its scope.
---@return liger.Tensor self
function methods:keep()
  self.storage.kept = true
  return self
end

local one_f32 = ffi.new("union { float f; uint32_t u; }")

local function bf16_to_number(bits)
  one_f32.u = bits * 65536
  return one_f32.f
end

-- A dense tensor's element at 0-based position i, as a Lua number.
local function element(t, data, i)
  local value = data[i]
  if t.dtype == "bf16" then
    return bf16_to_number(value)
  end
  return tonumber(value)
end

local function dense(t)
  check_live(t)
  if t:is_contiguous() and t.dtype ~= "f16" then
    return t
  end
  local y = Tensor.empty(t.shape, t.dtype == "f16" and "f32" or t.dtype)
  lib.check(C.lg_copy(lib.ctx, t:upload().raw, y.raw))
  return y
end

--- The values as nested Lua tables; a scalar gives a number. Waits for the device.
---@return number|table
function methods:to_table()
  local t = dense(self)
  local data, at = t:read(), 0
  local function build(depth)
    if depth > #t.shape then
      at = at + 1
      return element(t, data, at - 1)
    end
    local list = {}
    for i = 1, t.shape[depth] do
      list[i] = build(depth + 1)
    end
    return list
  end
  return build(1)
end

--- The value of a tensor with one element. Waits for the device.
---@return number
function methods:item()
  if self:numel() ~= 1 then
    lib.raise(("item: tensor is %s, wanted one element"):format(Tensor.shape_text(self.shape)))
  end
  local t = dense(self)
  return element(t, t:read(), 0)
end

local integer_range = { i32 = { -2 ^ 31, 2 ^ 31 - 1 }, i64 = { -2 ^ 53, 2 ^ 53 }, u8 = { 0, 255 } }

local function shape_of(value)
  local shape = {}
  while type(value) == "table" do
    shape[#shape + 1] = #value
    value = value[1]
  end
  return shape
end

--- The values of dense tensors of one dtype end to end, as an array of its C type from 0: one wait
--- for the device, however many there are.
---@param list liger.Tensor[]  at least one
---@return ffi.cdata*
function Tensor.read_all(list)
  if #list == 1 then
    return list[1]:read()
  end
  local n, at = 0, 0
  for _, t in ipairs(list) do
    n = n + t:numel()
  end
  local all = Tensor.empty({ n }, list[1].dtype)
  for _, t in ipairs(list) do
    Tensor.view_of(all, at, t.shape):copy_(t)
    at = at + t:numel()
  end
  return all:read()
end

--- A tensor from a number or nested Lua tables.
---@param values number|table
---@param dtype? string  default f32
---@return liger.Tensor
function Tensor.from_table(values, dtype)
  dtype = dtype or "f32"
  local shape = shape_of(values)
  local wide = (dtype == "bf16" or dtype == "f16") and "f32" or dtype
  local t = Tensor.stage(shape, wide)
  local data, at = t:data(), 0
  local range = integer_range[dtype]
  local function put(value, depth)
    if depth > #shape then
      if type(value) ~= "number" then
        lib.raise(("tensor: value %d is %s, wanted a number"):format(at + 1, type(value)))
      end
      if range and (value % 1 ~= 0 or value < range[1] or value > range[2]) then
        lib.raise(
          ("tensor: value %d is %s, wanted a whole number from %.0f to %.0f for %s"):format(
            at + 1, value, range[1], range[2], dtype
          )
        )
      end
      data[at] = value
      at = at + 1
      return
    end
    if type(value) ~= "table" or #value ~= shape[depth] then
      lib.raise(
        ("tensor: a list has %s values, wanted %d as in its siblings"):format(
          type(value) == "table" and #value or "no",
          shape[depth]
        )
      )
    end
    for i = 1, shape[depth] do
      put(value[i], depth + 1)
    end
  end
  put(values, 1)
  if wide == dtype then
    return t
  end
  local y = Tensor.empty(shape, dtype)
  lib.check(C.lg_copy(lib.ctx, t:upload().raw, y.raw))
  return y
end

--- Copies x into this tensor, converting the dtype. No gradient.
---@param x liger.Tensor
function methods:copy_(x)
  check_live(self)
  check_live(x)
  lib.check(C.lg_copy(lib.ctx, x:upload().raw, Tensor.to_write(self)))
  return self
end

--- Sets every element.
---@param value number
function methods:fill_(value)
  check_live(self)
  lib.check(C.lg_fill(lib.ctx, value, Tensor.to_write(self)))
  return self
end

local function number_text(x)
  if x == math.floor(x) and math.abs(x) < 1e9 then
    return ("%d"):format(x)
  end
  return ("%.5g"):format(x)
end

-- Shape, dtype and a few values: f32 [2,3] 0.1 0.2 ... 0.6
function Tensor.__tostring(t)
  if t.storage.dead then
    return ("%s %s (its scope ended)"):format(t.dtype, Tensor.shape_text(t.shape))
  end
  local flat = dense(t)
  local n, data = flat:numel(), flat:read()
  local list = {}
  for i = 0, math.min(n, 6) - 1 do
    list[#list + 1] = number_text(element(flat, data, i))
  end
  if n > 6 then
    list[#list + 1] = "... " .. number_text(element(flat, data, n - 1))
  end
  local grad = t.requires_grad and " requires_grad" or ""
  return ("%s %s%s  %s"):format(t.dtype, Tensor.shape_text(t.shape), grad, table.concat(list, " "))
end

return Tensor
