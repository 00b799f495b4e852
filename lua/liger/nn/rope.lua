-- Rotary position embedding: inverse frequencies from a config, and the cos and sin tables that
-- ops.rope reads. Everything is computed in double; positions past 256 do not fit bf16.
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

-- Each takes the unscaled frequencies, from_config's result and the longest sequence.
local scalings = {}

function scalings.default(freq)
  return freq
end

function scalings.linear(freq, rope)
  for i = 1, #freq do
    freq[i] = freq[i] / rope.scaling.factor
  end
  return freq
end

-- The length up to which the frequencies of the dynamic type stay as they are.
local function trained_length(rope)
  local scaling = rope.scaling
  return scaling.original_max_position_embeddings or scaling.max_position_embeddings
    or rope.max_positions
end

-- Dynamic NTK (transformers' rule): past the trained length the base grows with the sequence.
function scalings.dynamic(freq, rope, length)
  local trained, factor = trained_length(rope), rope.scaling.factor
  if length <= trained then
    return freq
  end
  local grown = factor * length / trained - (factor - 1)
  return default_frequencies(rope.theta * grown ^ (rope.dim / (rope.dim - 2)), rope.dim)
end

-- Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between
-- interpolated.
function scalings.llama3(freq, rope)
  local scaling = rope.scaling
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

--- The rope settings of a Hugging Face config, old keys (rope_theta, rope_scaling) and new
--- (rope_parameters).
---@param config table
---@param head_dim integer
---@return table rope  theta, dim (rotated dimensions of a head), scaling, max_positions
function M.from_config(config, head_dim)
  local parameters = config.rope_parameters
  local scaling = parameters or config.rope_scaling
  if scaling == nil then
    scaling = { rope_type = "default" }
  elseif type(scaling) ~= "table" then
    lib.raise(
      ("config: %s is %s, wanted an object"):format(
        parameters and "rope_parameters" or "rope_scaling", tostring(scaling)
      )
    )
  end
  local kind = scaling.rope_type or scaling.type or "default"
  if not scalings[kind] then
    lib.raise(
      ("config: rope type is %s, wanted default, linear, dynamic or llama3"):format(tostring(kind))
    )
  end
  local wants = { linear = { "factor" }, dynamic = { "factor" } }
  wants.llama3 = {
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
  }
  for _, key in ipairs(wants[kind] or {}) do
    local value = scaling[key]
    if type(value) ~= "number" or not (value > 0 and value < math.huge) then
      lib.raise(
        ("config: rope type %s: %s is %s, wanted a number above 0"):format(
          kind, key, tostring(value)
        )
      )
    end
  end
  local partial = scaling.partial_rotary_factor or config.partial_rotary_factor or 1
  if type(partial) ~= "number" or not (partial > 0 and partial <= 1) then
    lib.raise(
      (
        "config: partial_rotary_factor is %s, wanted a number above 0, at most 1"
      ):format(tostring(partial))
    )
  end
  local theta = scaling.rope_theta or config.rope_theta or 10000
  if type(theta) ~= "number" or not (theta > 0 and theta < math.huge) then
    lib.raise(("config: rope_theta is %s, wanted a number above 0"):format(tostring(theta)))
  end
  return {
    theta = theta,
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
  return scalings[rope.kind](freq, rope, length or 0)
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
  -- Past the trained length a table of the dynamic type serves one length.
  local only = rope.kind == "dynamic" and length > trained_length(rope) and length
  if cached and cached.only == only and cached.length >= length then
    return cached.cos, cached.sin
  end
  -- Powers of two, so that growing sequences rebuild rarely.
  local size = length
  if not only then
    size = 64
    while size < length do
      size = size * 2
    end
  end
  local freq = M.frequencies(rope, length)
  local half = #freq
  local cos = Tensor.stage({ size, half }, dtype):keep()
  local sin = Tensor.stage({ size, half }, dtype):keep()
  local cos_data, sin_data = cos:data(), sin:data()
  for p = 0, size - 1 do
    for i = 0, half - 1 do
      local angle = p * freq[i + 1]
      cos_data[p * half + i] = math.cos(angle)
      sin_data[p * half + i] = math.sin(angle)
    end
  end
  rope[key] = { cos = cos, sin = sin, length = size, only = only }
  return cos, sin
end

return M
