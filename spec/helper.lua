-- What all specs share: the package path, comparisons, gradients by central differences, golden
-- files. Specs are run from the project's root, by `./liger test` or by `busted --lua=luajit spec`.
for _, template in ipairs({ "./build/gen/?.lua", "./lua/?/init.lua", "./lua/?.lua" }) do
  if not package.path:find(template, 1, true) then
    package.path = template .. ";" .. package.path
  end
end

local ffi = require("ffi")
local assert = require("luassert")
local cjson = require("cjson")
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local memory = require("liger.memory")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local C = lib.C

local M = {}

-- ---- comparisons ----

local function flatten(x, into)
  if type(x) == "table" and not Tensor.is(x) then
    for _, value in ipairs(x) do
      flatten(value, into)
    end
  else
    into[#into + 1] = Tensor.is(x) and 0 or x
  end
  return into
end

--- The values of a tensor, a number or nested tables as a flat Lua array of numbers.
---@return number[]
function M.values(x)
  if not Tensor.is(x) then
    return flatten(x, {})
  end
  local y = Tensor.empty(x.shape, "f64")
  ops.copy(x, y)
  local data, list = y:read(), {}
  for i = 1, y:numel() do
    list[i] = data[i - 1]
  end
  return list
end

local function same_number(a, b)
  return a == b or (a ~= a and b ~= b)
end

--- The largest difference over the largest magnitude of what is wanted, at least `least` (default
--- 0; a single number: 1). Infinities and NaN must stand where they are wanted.
---@return number error
---@return integer index  of the largest difference, from 1
function M.difference(got, wanted, least)
  local a, b = M.values(got), M.values(wanted)
  assert(#a == #b, ("%d values, wanted %d"):format(#a, #b))
  local scale, worst, at = least or #b == 1 and 1 or 0, 0, 1
  for i = 1, #b do
    local size = math.abs(b[i])
    if size < math.huge and size > scale then
      scale = size
    end
  end
  for i = 1, #b do
    local difference = same_number(a[i], b[i]) and 0 or math.abs(a[i] - b[i])
    if difference ~= difference then
      difference = math.huge
    end
    if difference > worst then
      worst, at = difference, i
    end
  end
  return worst == 0 and 0 or worst / math.max(scale, 1e-300), at
end

--- Fails unless `got` agrees with `wanted` (tensors, numbers or tables) by M.difference.
---@param tolerance? number  default 1e-6
---@param what? string       named in the failure
---@param least? number      see M.difference
function M.close(got, wanted, tolerance, what, least)
  tolerance = tolerance or 1e-6
  local error, at = M.difference(got, wanted, least)
  if error > tolerance then -- never NaN
    assert(
      false,
      ("%s: value %d is %.9g, wanted %.9g (error %.2g, allowed %.2g)"):format(
        what or "values", at, M.values(got)[at], M.values(wanted)[at], error, tolerance
      )
    )
  end
end

local function bytes_of(x)
  if not x:is_contiguous() then
    local y = Tensor.empty(x.shape, x.dtype)
    ops.copy(x, y)
    x = y
  end
  return ffi.string(x:read(), x:numel() * Tensor.dtype_bytes[x.dtype])
end

--- True when two tensors have the same shape, dtype and bits.
function M.is_same(a, b)
  return a.dtype == b.dtype and Tensor.shape_text(a.shape) == Tensor.shape_text(b.shape)
    and bytes_of(a) == bytes_of(b)
end

--- Fails unless two tensors have the same shape, dtype and bits.
function M.same(a, b, what)
  if not M.is_same(a, b) then
    assert(false, ("%s: bits differ: %s; %s"):format(what or "tensors", tostring(a), tostring(b)))
  end
end

--- Fails unless fn raises an error that contains every one of the texts.
function M.raises(fails, ...)
  local ok, message = pcall(fails)
  autograd.reset()
  message = type(message) == "table" and message.message or message
  assert(not ok, "no error was raised, wanted: " .. (...))
  for _, text in ipairs({ ... }) do
    if not tostring(message):find(text, 1, true) then
      assert(false, ("error is %q, wanted %q in it"):format(tostring(message), text))
    end
  end
  return message
end

-- ---- tensors ----

--- Normal numbers from a stream of their own: the same at every call. Drawn in f64; on a device,
--- which has none, in f32.
---@param stream integer
---@param shape integer[]
---@param dtype? string  f32
function M.normal(stream, shape, dtype)
  local y = Tensor.empty(shape, lib.on_cpu and "f64" or "f32")
  ops.random_normal(20, stream, 0, 1, y)
  return M.to(y, dtype or "f32")
end

--- A dense copy in a dtype, without a graph.
function M.to(x, dtype)
  local y = Tensor.empty(x.shape, dtype)
  ops.copy(x, y)
  return y
end

--- x with its values in rows further apart: the last dimension dense, the row before it strided.
--- Also gives the whole room, which is -7 elsewhere.
function M.strided(x, gap)
  local shape, strides, stride = {}, {}, 1
  for i = #x.shape, 1, -1 do
    shape[i], strides[i] = x.shape[i], stride
    stride = stride * x.shape[i] + (i == #x.shape and gap or 0)
  end
  local room = Tensor.empty({ stride + gap }, x.dtype):fill_(-7)
  local y = Tensor.view_of(room, 1, shape, strides)
  ops.copy(x, y)
  return y, room
end

--- i32 tensor from numbers.
function M.ids(...)
  return Tensor.from_table({ ... }, "i32")
end

--- Parks blocks full of NaN, which the next tensors get: what is read before it is written shows.
function M.poison()
  local scope = memory.open_scope()
  local bytes = 64
  while bytes <= 2 ^ 15 do
    for _ = 1, 6 do
      Tensor.empty({ bytes / 8 }, "f64"):fill_(0 / 0)
    end
    bytes = bytes < 512 and bytes + 64 or bytes * 9 / 8 - bytes * 9 / 8 % 64
  end
  memory.close_scope(scope)
end

-- ---- gradients ----

local MOST = 48 -- elements of a tensor that are moved one by one

-- The elements to move: all of a small tensor, else a fixed spread of them.
local function picked(n)
  local list = {}
  if n <= MOST then
    for i = 0, n - 1 do
      list[#list + 1] = i
    end
  else
    for i = 0, MOST - 1 do
      list[#list + 1] = math.floor((i + 0.5) * n / MOST)
    end
  end
  return list
end

--- Slope of f when element i of the f64 tensor x moves: fourth-order central differences.
local function slope(f, x, i)
  local data = x:data()
  local old = data[i]
  local step = 1e-3 * math.max(math.abs(old), 0.1)
  local function at(k)
    data[i] = old + k * step
    local value = f()
    data[i] = old
    return value
  end
  return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
end

--- Fails unless `gradient` is that of f() with respect to the f64 tensor x, which f reads.
---@param f fun(): number
function M.check_gradient(f, x, gradient, tolerance, what)
  local moved, wanted, got = picked(x:numel()), {}, {}
  local all = M.values(gradient)
  local scale = 0
  for i = 1, #all do
    scale = math.max(scale, math.abs(all[i]))
  end
  for k, i in ipairs(moved) do
    wanted[k], got[k] = slope(f, x, i), all[i + 1]
    local error = math.abs(wanted[k] - got[k])
    if error > (tolerance or 1e-6) * math.max(scale, 1e-3) or error ~= error then
      assert(
        false,
        ("%s: gradient of element %d is %.9g, central differences give %.9g"):format(
          what or "gradient", i + 1, got[k], wanted[k]
        )
      )
    end
  end
end

--- Sum over the tensors of a fixed weighting of their elements: a scalar through which every output
--- gets its own gradient.
function M.weighted(outputs)
  local total
  for k, y in ipairs(outputs) do
    local part = fn.sum(y * M.normal(900 + k, y.shape, y.dtype))
    total = total and total + part or part
  end
  return total
end

--- Checks the gradients of build(inputs...) -> tensors, in f64, by central differences.
---@param inputs liger.Tensor[]  f64
function M.gradients(build, inputs, tolerance)
  local function loss(...)
    return M.weighted({ build(...) })
  end
  local leaves = {}
  for i, x in ipairs(inputs) do
    leaves[i] = M.to(x, "f64"):requires_grad_()
  end
  M.poison()
  loss(unpack(leaves)):backward()
  for i, x in ipairs(inputs) do
    M.check_gradient(function()
      return autograd.no_grad(loss, unpack(inputs)):item()
    end, x, leaves[i].grad or fn.full_like(x, 0), tolerance, "input " .. i)
  end
end

-- ---- golden files ----

--- The folder of golden numbers: LIGER_GOLDEN, or the project's own.
function M.golden_folder(name)
  local root = os.getenv("LIGER_GOLDEN")
  return (root and root ~= "" and root or "spec/fixtures") .. "/" .. name
end

local dtype_name = { [0] = "f32", "bf16", "f16", "f64", "i32", "i64", "u8" }

--- Every tensor of a safetensors file in its own dtype, and the header's metadata.
---@return table<string, liger.Tensor>
---@return table<string, string>
function M.read_tensors(path)
  local out = ffi.new("lg_file *[1]")
  lib.check(C.lg_file_open(lib.ctx, path, out))
  local file = out[0]
  local tensors = {}
  for i = 0, tonumber(C.lg_file_num_tensors(file)) - 1 do
    local entry = C.lg_file_tensor_at(file, i)
    local shape = {}
    for k = 1, entry.ndim do
      shape[k] = tonumber(entry.shape[k - 1])
    end
    local y = Tensor.stage(shape, assert(dtype_name[entry.dtype], path .. ": dtype"))
    local host = ffi.new("lg_tensor", y.raw)
    host.data, host.device = y:data(), C.LG_CPU
    lib.check(C.lg_file_read(lib.ctx, file, i, host))
    tensors[ffi.string(entry.name)] = y
  end
  local bytes = ffi.new("int64_t[1]")
  local text = C.lg_file_metadata(file, bytes)
  local metadata = text ~= nil and cjson.decode(ffi.string(text, bytes[0])) or {}
  C.lg_file_close(file)
  return tensors, metadata
end

-- ---- the project's own files ----

function M.read(path)
  local file = assert(io.open(path, "rb"), "cannot open " .. path)
  local text = file:read("*a")
  file:close()
  return text
end

--- Names in a folder, sorted; an empty list where there is none.
---@return string[]
function M.list(folder)
  local open = C.lg_sys_folder_open(folder)
  local names = {}
  if open ~= nil then
    local name = C.lg_sys_folder_next(open)
    while name ~= nil do
      names[#names + 1] = ffi.string(name)
      name = C.lg_sys_folder_next(open)
    end
    C.lg_sys_folder_close(open)
  end
  table.sort(names)
  return names
end

--- Runs Lua text in a process of its own, from the project's root; what it printed.
function M.run_lua(text)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write(("package.path = %q\n"):format(package.path), text)
  file:close()
  local pipe = io.popen(("luajit %q 2>&1"):format(path))
  local printed = pipe:read("*a")
  pipe:close()
  os.remove(path)
  return printed
end

function M.exists(path)
  local file = io.open(path, "rb")
  if file then
    file:close()
  end
  return file ~= nil
end

--- Calls fn with each number of threads, then goes back to all cores.
function M.with_threads(counts, each)
  for _, count in ipairs(counts) do
    lib.set_threads(count)
    each(count)
  end
  lib.set_threads(0)
end

return M
