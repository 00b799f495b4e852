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

-- Each takes the unscaled frequencies, from_config's result and the longest sequence. A second
-- result multiplies cos and sin.
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

-- The length that a model was first trained for: up to it frequencies of the dynamic and longrope
-- types are those of short sequences.
local function trained_length(rope)
  local scaling = rope.scaling
  return scaling.original_max_position_embeddings or rope.original_max_positions
    or scaling.max_position_embeddings or rope.max_positions
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

local function clamp01(x)
  return math.max(0, math.min(1, x))
end

-- YaRN (Peng et al. 2023, equations 19 to 23, as transformers has it): columns that turn more than
-- beta_fast times over the trained length stay, those below beta_slow turns are divided by the
-- factor, the ramp between runs over column numbers.
function scalings.yarn(freq, rope)
  local scaling, dim = rope.scaling, rope.dim
  local factor = scaling.factor
  local function column_of(turns)
    return dim * math.log(trained_length(rope) / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
  end
  local low, high = column_of(scaling.beta_fast or 32), column_of(scaling.beta_slow or 1)
  if scaling.truncate ~= false then
    low, high = math.floor(low), math.ceil(high)
  end
  low, high = math.max(low, 0), math.min(high, dim - 1)
  if low == high then
    high = high + 0.001
  end
  for i = 1, #freq do
    local divided = clamp01((i - 1 - low) / (high - low))
    freq[i] = freq[i] / factor * divided + freq[i] * (1 - divided)
  end
  local function magnitude(m)
    return factor <= 1 and 1 or 0.1 * m * math.log(factor) + 1
  end
  local one, all = scaling.mscale or 0, scaling.mscale_all_dim or 0
  return freq, scaling.attention_factor
    or (one > 0 and all > 0 and magnitude(one) / magnitude(all)) or magnitude(1)
end

-- LongRoPE (Ding et al. 2024): a factor a column, one list up to the trained length, one past it.
function scalings.longrope(freq, rope, length)
  local scaling, trained = rope.scaling, trained_length(rope)
  local divisor = length > trained and scaling.long_factor or scaling.short_factor
  for i = 1, #freq do
    freq[i] = freq[i] / divisor[i]
  end
  local grown = (scaling.max_position_embeddings or rope.max_positions) / trained
  local factor = scaling.attention_factor
  if not factor then
    factor = grown <= 1 and 1 or math.sqrt(1 + math.log(grown) / math.log(trained))
  end
  return freq, factor
end

-- What a scaling type needs to find in the config; "list" is a number a rotated pair.
local POSITIVE = {
  linear = { "factor" }, dynamic = { "factor" }, yarn = { "factor" },
  llama3 = { "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings" },
}
local OPTIONAL = {
  dynamic = { "original_max_position_embeddings", "max_position_embeddings" },
  longrope = {
    "original_max_position_embeddings", "max_position_embeddings", "attention_factor",
  },
  yarn = {
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim",
  },
}
local LISTS = { longrope = { "short_factor", "long_factor" } }

local function is_positive(value)
  return type(value) == "number" and value > 0 and value < math.huge
end

local function check_scaling(scaling, kind, pairs_count)
  local function refuse(key, wanted)
    lib.raise(
      ("config: rope type %s: %s is %s, wanted %s"):format(
        kind, key, tostring(scaling[key]), wanted
      )
    )
  end
  for _, key in ipairs(POSITIVE[kind] or {}) do
    if not is_positive(scaling[key]) then
      refuse(key, "a number above 0")
    end
  end
  for _, key in ipairs(OPTIONAL[kind] or {}) do
    -- A magnitude of 0 is none.
    local off = scaling[key] == nil or key:find("^mscale") and scaling[key] == 0
    if not off and not is_positive(scaling[key]) then
      refuse(key, "a number above 0")
    end
  end
  for _, key in ipairs(LISTS[kind] or {}) do
    local list, fine = scaling[key], type(scaling[key]) == "table"
    for i = 1, fine and pairs_count or 0 do
      fine = fine and is_positive(list[i])
    end
    if not fine or #list ~= pairs_count then
      refuse(key, ("a list of %d numbers above 0"):format(pairs_count))
    end
  end
end

--- The rope settings of a Hugging Face config, old keys (rope_theta, rope_scaling) and new
--- (rope_parameters).
---@param config table
---@param head_dim integer
---@return table rope  theta, dim (rotated dimensions of a head), scaling, kind, max_positions,
---   original_max_positions
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
      ("config: rope type is %s, wanted default, linear, dynamic, llama3, yarn or longrope"):format(
        tostring(kind)
      )
    )
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
  local dim = math.floor(head_dim * partial / 2) * 2
  check_scaling(scaling, kind, dim / 2)
  return {
    theta = theta,
    dim = dim,
    scaling = scaling,
    kind = kind,
    max_positions = config.max_position_embeddings or 2048,
    original_max_positions = config.original_max_position_embeddings,
  }
end

--- Inverse frequencies of the rotated dimensions.
---@param rope table     from_config's result
---@param length? integer the longest sequence, for types that depend on it
---@return number[] frequencies
---@return number attention_factor  cos and sin are multiplied by it
function M.frequencies(rope, length)
  local freq = default_frequencies(rope.theta, rope.dim)
  local scaled, factor = scalings[rope.kind](freq, rope, length or 0)
  return scaled, factor or 1
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
  -- Past the trained length a table of the dynamic type serves one length; those of longrope serve
  -- short sequences or long ones.
  local only = false
  if rope.kind == "dynamic" or rope.kind == "longrope" then
    only = length > trained_length(rope) and (rope.kind == "longrope" and "long" or length)
  end
  if cached and cached.only == only and cached.length >= length then
    return cached.cos, cached.sin
  end
  -- Powers of two, so that growing sequences rebuild rarely.
  local size = length
  if type(only) ~= "number" then
    size = 64
    while size < length do
      size = size * 2
    end
  end
  local freq, factor = M.frequencies(rope, length)
  local half = #freq
  local cos = Tensor.stage({ size, half }, dtype):keep()
  local sin = Tensor.stage({ size, half }, dtype):keep()
  local cos_data, sin_data = cos:data(), sin:data()
  for p = 0, size - 1 do
    for i = 0, half - 1 do
      local angle = p * freq[i + 1]
      cos_data[p * half + i] = math.cos(angle) * factor
      sin_data[p * half + i] = math.sin(angle) * factor
    end
  end
  rope[key] = { cos = cos, sin = sin, length = size, only = only }
  return cos, sin
end

--- Which of a token's positions each column of the tables reads, for ops.rope_planes: blocks of
--- columns (time, height, width in Qwen2-VL; row and column of an image), or, interleaved as in
--- Qwen3-VL, column i is plane i mod the number of planes while that plane's section lasts, then
--- plane 0.
---@param sections integer[]      columns a plane; their sum is the number of rotated pairs
---@param interleaved? boolean
---@return liger.Tensor plane     [R] i32
function M.planes(sections, interleaved)
  local list, R = {}, 0
  for m, size in ipairs(sections) do
    if type(size) ~= "number" or size < 0 or size % 1 ~= 0 then
      lib.raise(
        ("rope.planes: section %d is %s, wanted a whole number from 0"):format(m, tostring(size))
      )
    end
    for _ = 1, size do
      list[#list + 1] = m - 1
    end
    R = R + size
  end
  for i = 0, interleaved and R - 1 or -1 do
    local m = i % #sections
    list[i + 1] = i < sections[m + 1] * #sections and m or 0
  end
  return Tensor.from_table(list, "i32")
end

return M
