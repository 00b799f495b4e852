-- Loads a model: a Hugging Face folder or a GGUF file becomes a decoder and its tokenizer; saves
-- one as a folder.
local cjson = require("cjson")
local ffi = require("ffi")
local decoder = require("liger.model.decoder")
local files = require("liger.file")
local gguf = require("liger.model.gguf")
local lib = require("liger.ffi")
local memory = require("liger.memory")
local weights = require("liger.model.weights")

local M = {}

-- Families by model_type; the module is loaded when a model asks for it.
local FAMILIES = { llama = "liger.model.llama", qwen3 = "liger.model.qwen3" }

local function read_file(path)
  local file = io.open(path, "rb")
  if not file then
    return nil
  end
  local text = file:read("*a")
  file:close()
  return text
end

-- JSON null becomes nil: a config's null means the default.
local function without_null(value)
  if type(value) ~= "table" then
    return value ~= cjson.null and value or nil
  end
  for key, item in pairs(value) do
    if item == cjson.null then
      value[key] = nil
    elseif type(item) == "table" then
      without_null(item)
    end
  end
  return value
end

local function read_json(path)
  local text = read_file(path)
  if not text then
    return nil
  end
  local ok, value = pcall(cjson.decode, text)
  if not ok or type(value) ~= "table" then
    files.fail(path, "not a JSON object: %s", ok and type(value) or value)
  end
  return without_null(value)
end

local NEEDED = {
  "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
}

local OPTIONAL = { "num_key_value_heads", "head_dim", "max_position_embeddings" }
local BOOLEANS = {
  "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
}

-- Types, and settings that would change the result if they were passed over.
local function check_config(config, path)
  local function whole(key, optional)
    local value = config[key]
    if not (optional and value == nil) and (
      type(value) ~= "number" or value < 1 or value % 1 ~= 0 or value > 2 ^ 31
    ) then
      files.fail(path, "%s is %s, wanted a whole number from 1", key, tostring(value))
    end
  end
  for _, key in ipairs(NEEDED) do
    whole(key)
  end
  for _, key in ipairs(OPTIONAL) do
    whole(key, true)
  end
  for _, key in ipairs(BOOLEANS) do
    local value = config[key]
    if value ~= nil and type(value) ~= "boolean" then
      files.fail(path, "%s is %s, wanted true or false", key, tostring(value))
    end
  end
  local eps = config.rms_norm_eps
  if eps ~= nil and (type(eps) ~= "number" or not (eps > 0 and eps < math.huge)) then
    files.fail(path, "rms_norm_eps is %s, wanted a number above 0", tostring(eps))
  end
  local act = config.hidden_act
  if act and act ~= "silu" then
    files.fail(path, "hidden_act is %s, wanted silu", tostring(act))
  end
end

-- What attention sees: a setting that the family does not have is refused.
local function check_attention(config, path, family)
  local slides = config.use_sliding_window
  local function refuse(key, wanted)
    files.fail(path, "%s is %s, wanted %s", key, tostring(config[key]), wanted)
  end
  local nothing = ("none for %s"):format(config.model_type)
  if config.attn_logit_softcapping ~= nil then
    refuse("attn_logit_softcapping", nothing)
  elseif slides and not family.slides then
    refuse("use_sliding_window", nothing)
  elseif config.sliding_window ~= nil and slides == nil and not family.slides then
    refuse("sliding_window", nothing)
  end
  for key, least in pairs({ sliding_window = 1, max_window_layers = 0 }) do
    local value = config[key]
    if slides and value ~= nil and (
      type(value) ~= "number" or value < least or value % 1 ~= 0 or value > 2 ^ 31
    ) then
      refuse(key, ("a whole number from %d"):format(least))
    end
  end
  local kinds = config.layer_types
  if kinds ~= nil and (type(kinds) ~= "table" or #kinds ~= config.num_hidden_layers) then
    files.fail(
      path, "layer_types has %s entries, wanted %d", type(kinds) == "table" and #kinds or "no",
      config.num_hidden_layers
    )
  end
  for i, kind in ipairs(kinds or {}) do
    if kind ~= "full_attention" and not (slides and kind == "sliding_attention") then
      files.fail(
        path, "layer_types[%d] is %s, wanted full_attention%s", i - 1, tostring(kind),
        slides and " or sliding_attention" or ""
      )
    end
  end
end

--- A decoder for a config, its weights not initialised.
---@param config table   Hugging Face config
---@param options? { dtype?: string, path?: string }
---@return liger.Decoder model
---@return table family
function M.from_config(config, options)
  local path = options and options.path or "config"
  local name = FAMILIES[config.model_type]
  if not name then
    files.fail(path, "model_type is %s, wanted llama or qwen3", tostring(config.model_type))
  end
  check_config(config, path)
  local family = require(name)
  check_attention(config, path, family)
  local model = decoder.new(family.shape(config), config, options and options.dtype or "f32")
  return model, family
end

local function ids_of(value)
  if type(value) == "number" then
    return { value }
  end
  return type(value) == "table" and value or {}
end

-- The union of the stop ids that config, generation config and tokenizer name.
local function stop_ids(config, generation, tokenizer)
  local list, seen = {}, {}
  local function add(ids)
    for _, id in ipairs(ids) do
      if not seen[id] then
        seen[id] = true
        list[#list + 1] = id
      end
    end
  end
  add(ids_of(generation and generation.eos_token_id))
  add(ids_of(config.eos_token_id))
  add(ids_of(tokenizer and tokenizer.eos_id))
  return list
end

local function load_folder(path, dtype)
  local config = read_json(path .. "/config.json")
  local parts = {}
  local shards = read_json(path .. "/model.safetensors.index.json")
  if shards then
    local seen, map = {}, shards.weight_map
    if type(map) ~= "table" then
      files.fail(
        path .. "/model.safetensors.index.json", "weight_map is a %s, wanted an object", type(map)
      )
    end
    for _, name in pairs(map) do
      if not seen[name] then
        seen[name] = true
        parts[#parts + 1] = { path = path .. "/" .. name }
      end
    end
    table.sort(parts, function(a, b)
      return a.path < b.path
    end)
  else
    parts[1] = { path = path .. "/model.safetensors" }
  end
  for _, f in ipairs(parts) do
    f.file = weights.open(f.path)
  end
  local model = M.from_config(config, { dtype = dtype, path = path .. "/config.json" })
  weights.load(model, weights.index(parts), path)
  local generation = read_json(path .. "/generation_config.json")
  local has_tokenizer = read_file(path .. "/tokenizer.json") ~= nil
  local tokenizer = has_tokenizer and require("liger.data.tokenizer").load(path) or nil
  return model, tokenizer, generation
end

--- The metadata of an open GGUF or safetensors file.
---@return table
function M.metadata(file)
  local bytes = ffi.new("int64_t[1]")
  local text = lib.C.lg_file_metadata(file, bytes)
  return cjson.decode(ffi.string(text, bytes[0]))
end

local function load_gguf(path, dtype)
  local file = weights.open(path)
  local meta = M.metadata(file)
  local index = weights.index({ { path = path, file = file } })
  local config = gguf.config(meta, index, path)
  local model, family = M.from_config(config, { dtype = dtype, path = path })
  weights.load(
    model, index, path, gguf.name, family.gguf_interleaved and gguf.deinterleave(model.shape) or nil
  )
  return model, require("liger.data.tokenizer").from_gguf(meta, path)
end

--- Loads a checkpoint.
---@param path string   a Hugging Face folder (config.json, safetensors, tokenizer.json), a run's
---   checkpoint, or a GGUF file
---@param options? { dtype?: string }  f32 (default), bf16 or f64
---@return liger.Decoder model
---@return liger.Tokenizer|nil tokenizer  nil when the folder has none
function M.load(path, options)
  if type(path) ~= "string" then
    lib.raise(("load: path is a %s, wanted a string"):format(type(path)))
  end
  for key in pairs(options or {}) do
    if key ~= "dtype" then
      lib.raise(("load: unknown option %s"):format(tostring(key)))
    end
  end
  local dtype = options and options.dtype or "f32"
  local scope = memory.open_scope()
  local model, tokenizer, generation
  if read_file(path .. "/config.json") then
    model, tokenizer, generation = load_folder(path, dtype)
  else
    local probe = io.open(path, "rb")
    local magic = probe and probe:read(4)
    if probe then
      probe:close()
    end
    if magic ~= "GGUF" then
      files.fail(
        path, "%s, wanted a folder with config.json or a GGUF file",
        probe and "neither a model folder nor a GGUF file" or "no such file or folder"
      )
    end
    model, tokenizer = load_gguf(path, dtype)
  end
  memory.close_scope(scope)
  model.path, model.generation_config, model.tokenizer = path, generation, tokenizer
  model.stop_ids = stop_ids(model.config, generation, tokenizer)
  return model, tokenizer
end

-- The generation config that the model was loaded with, its stop ids as they are now; nil: none.
local function generation_config(model)
  local ids, generation = model.stop_ids or {}, {}
  for key, value in pairs(model.generation_config or {}) do
    generation[key] = value
  end
  generation.eos_token_id = #ids > 1 and ids or ids[1]
  return next(generation) and generation
end

--- Writes a model as a Hugging Face folder: config.json, generation_config.json (the stop ids),
--- model.safetensors and, from where it was loaded, the tokenizer's files.
---@param model liger.Decoder
---@param folder string       made when it is not there
---@param tokenizer? liger.Tokenizer
function M.save(model, folder, tokenizer)
  local code = lib.C.lg_sys_make_folders(folder)
  if code ~= 0 then
    files.fail(folder, "cannot be made: %s", ffi.string(lib.C.lg_sys_error(code)))
  end
  weights.save(model, folder .. "/model.safetensors")
  local config = {}
  for key, value in pairs(model.config) do
    config[key] = value
  end
  -- Newer files spell it dtype.
  config[config.dtype and "dtype" or "torch_dtype"] = (
    { f32 = "float32", bf16 = "bfloat16", f64 = "float64" }
  )[model.dtype]
  files.write(folder .. "/config.json", cjson.encode(config) .. "\n")
  local generation = generation_config(model)
  if generation then
    files.write(folder .. "/generation_config.json", cjson.encode(generation) .. "\n")
  end
  if tokenizer and tokenizer.files then
    for name, text in pairs(tokenizer:files()) do
      files.write(folder .. "/" .. name, text)
    end
  end
end

return M
