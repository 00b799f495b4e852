-- Reads spec/cases/<op>.lua: a case's inputs in a dtype, and an op run on them by name. Specs and
-- the bench use it.
--
-- A case is { shapes = {...}, bench = {...}, inputs = function(r, s), bytes = function(s, width) }.
-- `inputs` gives a table by parameter name; r.normal(sizes...), r.uniform(low, high, sizes...),
-- r.integer(low, high, sizes...) and r.list(values, dtype) draw. What dtype a tensor has at last
-- follows from the op's shape line. grad = false in a shape: too large for finite differences;
-- device_shapes: sizes that only a device's kernels need to see.
local helper = require("spec.helper")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local M = {}

local is_integer = { i32 = true, i64 = true, u8 = true }

--- The case of an op, or nil.
function M.of(name)
  local path = "spec/cases/" .. name .. ".lua"
  return helper.exists(path) and dofile(path) or nil
end

-- Draws in f64 (f32 on a device, which has none); every call takes its own stream.
local function drawer()
  local stream = 0
  local function next_tensor(sizes)
    stream = stream + 1
    return Tensor.empty(sizes, lib.on_cpu and "f64" or "f32")
  end
  local r = {}
  function r.normal(...)
    local y = next_tensor({ ... })
    ops.random_normal(11, stream, 0, 1, y)
    return y
  end
  function r.uniform(low, high, ...)
    local y = next_tensor({ ... })
    ops.random_uniform(12, stream, y)
    return ops.affine(y, high - low, low)
  end
  function r.integer(low, high, ...)
    local y = next_tensor({ ... })
    ops.random_uniform(13, stream, y)
    local z, data = Tensor.stage(y.shape, "i32"), y:read()
    for i = 0, y:numel() - 1 do
      z:data()[i] = math.min(low + math.floor(data[i] * (high - low + 1)), high)
    end
    return z
  end
  -- Logits whose first `count` classes have probability 0, but for a row's target (or first one).
  function r.masked(z, count, target)
    for n = 1, z.shape[1] do
      local own = type(target[n]) == "table" and target[n][1] or target[n]
      for v = 0, count - 1 do
        z:data()[(n - 1) * z.shape[2] + v] = v == own and 0 or -math.huge
      end
    end
    return z
  end
  function r.list(values, dtype)
    return Tensor.from_table(values, dtype or lib.on_cpu and "f64" or "f32")
  end
  return r
end

--- The dtype that a tensor of a shape line has when the shared one is `dtype`.
function M.dtype_of(t, dtype)
  if t.dtype == "shared" or t.dtype == "any" then
    return dtype
  elseif t.dtype == "acc" then
    return dtype == "f64" and "f64" or "f32"
  end
  return t.dtype
end

--- The inputs and attributes of a shape in a dtype, by name. `rounded`: a dtype whose rounding the
--- values pass first.
function M.inputs(op, case, shape, dtype, rounded)
  local values = case.inputs(drawer(), shape)
  for name, x in pairs(values) do
    local t = op.tensor[name]
    if t then
      x = rounded and helper.to(x, M.dtype_of(t, rounded)) or x
      values[name] = helper.to(x, M.dtype_of(t, dtype))
    end
  end
  return values
end

-- Sizes of the letters and the leading dimensions, from the tensors that are there.
local function bind(op, values)
  local bound = {}
  for _, t in ipairs(op.tensors) do
    local x = values[t.name]
    if x then
      local lead = #x.shape - #t.dims + 1
      local at = 0
      for _, d in ipairs(t.dims) do
        if d.any then
          bound["*"] = bound["*"] or {}
          for i = 1, lead do
            bound["*"][i] = x.shape[i]
          end
          at = lead
        else
          at = at + 1
          if d.letter then
            bound[d.letter] = bound[d.letter] or x.shape[at] - d.plus
          end
        end
      end
    end
  end
  return bound
end

local function shape_of(t, bound)
  local shape = {}
  for _, d in ipairs(t.dims) do
    if d.any then
      for _, size in ipairs(bound["*"]) do
        shape[#shape + 1] = size
      end
    else
      shape[#shape + 1] = d.letter and bound[d.letter] + d.plus or d.number
    end
  end
  return shape
end

--- A new tensor for the output t, given the values that are there.
function M.output(op, t, values, dtype)
  return Tensor.empty(shape_of(t, bind(op, values)), M.dtype_of(t, dtype))
end

--- Calls the raw op with parameters by name.
function M.call(op, values)
  local args = {}
  for i, p in ipairs(op.params) do
    args[i] = values[p.name]
  end
  return ops.raw[op.name](unpack(args, 1, #op.params))
end

--- Runs a forward on inputs by name. Gives all parameters by name, outputs too; what is updated in
--- place is a copy.
---@param without? table<string, boolean>  outputs that are not asked for
function M.forward(op, inputs, dtype, without)
  local values = {}
  for name, x in pairs(inputs) do
    local t = op.tensor[name]
    values[name] = t and t.role ~= "input" and helper.to(x, x.dtype) or x
  end
  for _, t in ipairs(op.tensors) do
    if t.role == "output" and not values[t.name] and not (without and without[t.name]) then
      local y = M.output(op, t, inputs, dtype)
      -- NaN shows what is not written; of integers -9 does.
      y:fill_(t.accumulate and 0 or is_integer[y.dtype] and -9 or 0 / 0)
      values[t.name] = y
    end
  end
  M.call(op, values)
  return values
end

--- Names of the inputs and the outputs that have a gradient.
function M.differentiable(op)
  local inputs, outputs = {}, {}
  for _, t in ipairs(op.tensors) do
    local d = op.backward and op.backward.tensor["d" .. t.name]
    if d then
      table.insert(t.role == "input" and inputs or outputs, t.name)
    end
  end
  return inputs, outputs
end

--- Fixed gradients from above, by output name.
function M.upstream(op, values, dtype)
  local up = {}
  local _, outputs = M.differentiable(op)
  for k, name in ipairs(outputs) do
    local y = values[name]
    if y then
      up[name] = helper.normal(70 + k, y.shape, M.dtype_of(op.tensor[name], dtype))
    end
  end
  return up
end

--- Runs the backward after a forward. Gives the gradients by input name; sums start at `start`.
---@param values table    what M.forward gave
---@param up table        gradients of the outputs by name
---@param wanted table    input names
---@param options? table  start, without (parameter names to leave out), make (allocates an output)
function M.backward(op, values, up, wanted, dtype, options)
  options = options or {}
  local back = op.backward
  local args = {}
  for _, p in ipairs(back.params) do
    local base = p.name:sub(1, 1) == "d" and p.name:sub(2)
    local x = values[p.name]
    if base and op.tensor[base] then
      x = up[base]
    elseif p.tensor and p.tensor.role ~= "input" and x then
      x = helper.to(x, x.dtype)
    end
    if not (options.without and options.without[p.name]) then
      args[p.name] = x
    end
  end
  local gradients = {}
  for _, name in ipairs(wanted) do
    local t = back.tensor["d" .. name]
    if values[name] then
      local shape, kind = values[name].shape, M.dtype_of(t, dtype)
      local y = options.make and options.make(t, shape, kind) or Tensor.empty(shape, kind)
      y:fill_(t.accumulate and (options.start or 0) or 0 / 0)
      args["d" .. name] = y
      gradients[name] = y
    end
  end
  M.call(back, args)
  return gradients, args
end

--- Every operator that is no backward.
function M.ops()
  local list = {}
  for _, op in ipairs(ops.schema) do
    if not op.backward_of then
      list[#list + 1] = op
    end
  end
  return list
end

-- {10,10,10,7} as "10x3,7"
local function runs(list)
  local parts, i = {}, 1
  while i <= #list do
    local stop = i
    while list[stop + 1] == list[i] do
      stop = stop + 1
    end
    parts[#parts + 1] = stop > i and ("%sx%d"):format(list[i], stop - i + 1) or tostring(list[i])
    i = stop + 1
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

--- "S=9 N=40"
function M.text(shape)
  local keys = {}
  for key in pairs(shape) do
    keys[#keys + 1] = tostring(key)
  end
  table.sort(keys)
  for i, key in ipairs(keys) do
    local value = shape[key]
    keys[i] = key .. "="
      .. (type(value) == "table" and runs(value) or tostring(value))
  end
  return table.concat(keys, " ")
end

return M
