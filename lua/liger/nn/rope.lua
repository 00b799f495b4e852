-- Rotary position embedding: inverse frequencies from a config, and the cos and sin tables that ops.rope reads. Everything is
-- computed in double; positions past 256 do not fit bf16.
local lib = require("liger.ffi")
local Tensor = require("liger.tensor")

local M = {}

local function default_frequencies(theta, dim)
  local freq = {}
  for i = 1, dim / 2 do
    freq[i] = theta ^ (-2 * (i - 1) / dim)
  end
  return freq
end

-- Each takes the unscaled frequencies, the scaling table of the config, and { theta, dim, length, max_positions }.
local scalings = {}

function scalings.default(freq)
  return freq
end

function scalings.linear(freq, scaling)
  for i = 1, #freq do
    freq[i] = freq[i] / scaling.factor
  end
  return freq
end

-- Dynamic NTK (transformers' rule): past the trained length the base grows with the sequence.
function scalings.dynamic(freq, scaling, rope)
  local trained = scaling.original_max_position_embeddings or scaling.max_position_embeddings or rope.max_positions
  if rope.length <= trained then
    return freq
  end
  local grown = scaling.factor * rope.length / trained - (scaling.factor - 1)
  return default_frequencies(rope.theta * grown ^ (rope.dim / (rope.dim - 2)), rope.dim)
end

-- Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated.
function scalings.llama3(freq, scaling)
  local factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
  local trained = scaling.original_max_position_embeddings
  for i = 1, #freq do
    local wavelength = 2 * math.pi / freq[i]
    if wavelength > trained / low then
      freq[i] = freq[i] / factor
    elseif wavelength >= trained / high then
      local smooth = (trained / wavelength - low) / (high - low)
      freq[i] = (1 - smooth) * freq[i] / factor + smooth * freq[i]
    end
  end
  return freq
end

--- The rope settings of a Hugging Face config, old keys (rope_theta, rope_scaling) and new (rope_parameters).
---@param config table
---@param head_dim integer
---@return table rope  theta, dim (rotated dimensions of a head), scaling, max_positions
function M.from_config(config, head_dim)
  local parameters = config.rope_parameters
  local scaling = parameters or config.rope_scaling
  if scaling == nil or type(scaling) ~= "table" then
    scaling = { rope_type = "default" }
  end
  local kind = scaling.rope_type or scaling.type or "default"
  if not scalings[kind] then
    lib.raise(("config: rope type is %s, wanted default, linear, dynamic or llama3"):format(tostring(kind)))
  end
  local wants = { linear = { "factor" }, dynamic = { "factor" } }
  wants.llama3 = { "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings" }
  for _, key in ipairs(wants[kind] or {}) do
    if type(scaling[key]) ~= "number" then
      lib.raise(("config: rope type %s has no %s"):format(kind, key))
    end
  end
  local partial = scaling.partial_rotary_factor or config.partial_rotary_factor or 1
  return {
    theta = scaling.rope_theta or config.rope_theta or 10000,
    dim = math.floor(head_dim * partial / 2) * 2,
    scaling = scaling,
    kind = kind,
    max_positions = config.max_position_embeddings or 2048,
  }
end

--- Inverse frequencies of the rotated dimensions.
---@param rope table     from_config's result
---@param length? integer the longest sequence, for types that depend on it
---@return number[]
function M.frequencies(rope, length)
  local freq = default_frequencies(rope.theta, rope.dim)
  local settings = { theta = rope.theta, dim = rope.dim, length = length or 0, max_positions = rope.max_positions }
  return scalings[rope.kind](freq, rope.scaling, settings)
end

--- cos and sin of positions 0 .. length - 1, kept and grown as longer sequences come.
---@param rope table
---@param length integer
---@param dtype string      f32, or f64 for gradient checks
---@return liger.Tensor cos  [P, dim / 2], P >= length
---@return liger.Tensor sin  [P, dim / 2]
function M.tables(rope, length, dtype)
  local key = "tables_" .. dtype
  local cached = rope[key]
  if cached and cached.length >= length then
    return cached.cos, cached.sin
  end
  -- Powers of two, so that growing sequences rebuild rarely; types that look at the length must not round it up.
  local size = length
  if rope.kind ~= "dynamic" then
    size = 64
    while size < length do
      size = size * 2
    end
  end
  local freq = M.frequencies(rope, length)
  local half = #freq
  local cos = Tensor.empty({ size, half }, dtype):keep()
  local sin = Tensor.empty({ size, half }, dtype):keep()
  local cos_data, sin_data = cos:data(), sin:data()
  for p = 0, size - 1 do
    for i = 0, half - 1 do
      local angle = p * freq[i + 1]
      cos_data[p * half + i] = math.cos(angle)
      sin_data[p * half + i] = math.sin(angle)
    end
  end
  rope[key] = { cos = cos, sin = sin, length = size }
  return cos, sin
end

return M
