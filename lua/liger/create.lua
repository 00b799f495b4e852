-- New tensors: of one value, and of random numbers.
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local M = {}

local function size_list(op, ...)
  local shape, dtype = { ... }, "f32"
  if type(shape[#shape]) == "string" then
    dtype = table.remove(shape)
  end
  for i, size in ipairs(shape) do
    if type(size) ~= "number" then
      lib.raise(("%s: size %d is %s, wanted a number"):format(op, i, type(size)))
    end
  end
  return shape, dtype
end

--- A tensor of the value: `full(0.5, 2, 3, "f64")`.
---@param value number
---@param ... integer|string  sizes, then perhaps a dtype (f32)
---@return liger.Tensor
function M.full(value, ...)
  local shape, dtype = size_list("full", ...)
  return Tensor.empty(shape, dtype):fill_(value)
end

--- Zeros: `zeros(2, 3, "bf16")`.
function M.zeros(...)
  return M.full(0, ...)
end

--- Ones.
function M.ones(...)
  return M.full(1, ...)
end

--- A tensor of x's shape and dtype, filled with the value.
function M.full_like(x, value)
  return Tensor.empty(x.shape, x.dtype):fill_(value)
end

local generator = { seed = 0, stream = 0 }

--- Seeds randn and rand; every call after it takes the next Philox stream.
---@param seed integer
function M.manual_seed(seed)
  if type(seed) ~= "number" or seed % 1 ~= 0 then
    lib.raise(("manual_seed: seed is %s, wanted a whole number"):format(tostring(seed)))
  end
  generator.seed, generator.stream = seed, 0
end

--- Where randn and rand are, for set_random_state.
---@return { seed: integer, stream: integer }
function M.random_state()
  return { seed = generator.seed, stream = generator.stream }
end

--- Takes randn and rand back to where they were.
---@param state { seed: integer, stream: integer }
function M.set_random_state(state)
  generator.seed, generator.stream = state.seed, state.stream
end

local function next_stream()
  generator.stream = generator.stream + 1
  return generator.stream
end

--- Normal numbers of mean 0 and deviation 1: `randn(2, 3)`.
function M.randn(...)
  local shape, dtype = size_list("randn", ...)
  local y = Tensor.empty(shape, dtype)
  ops.random_normal(generator.seed, next_stream(), 0, 1, y)
  return y
end

--- Uniform numbers in (0, 1].
function M.rand(...)
  local shape, dtype = size_list("rand", ...)
  local y = Tensor.empty(shape, dtype)
  ops.random_uniform(generator.seed, next_stream(), y)
  return y
end

return M
