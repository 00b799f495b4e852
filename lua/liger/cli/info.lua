-- liger info: what a model is, from its config and its files' directories; no weight is read.
local ffi = require("ffi")
local model_cli = require("liger.cli.model")

local M = {}

M.help = [[
usage: liger info MODEL [options]

Architecture, size, vocabulary, context and tokenizer of a Hugging Face folder or a GGUF file.

  liger info models/SmolLM2-135M
  liger info model.gguf --json
]]

local command = {
  name = "info",
  help = M.help,
  words = { "MODEL" },
  keys = { { name = "json", default = false, comment = "print one object" } },
}

-- Bytes of a file, or nil where there is none.
local function file_bytes(path)
  local C = require("liger.ffi").C
  local info = ffi.new("lg_sys_info")
  local status = C.lg_sys_stat(path, info)
  return status == 0 and not info.is_folder and info.bytes or nil
end

-- An object whose null keys are left out, or nil where there is no such file.
local function read_json(path)
  local cjson = require("cjson")
  local file = io.open(path, "rb")
  if not file then
    return nil
  end
  local ok, value = pcall(cjson.decode, file:read("*a"))
  file:close()
  if not ok or type(value) ~= "table" then
    model_cli.fail(("%s: no JSON object: %s"):format(path, ok and type(value) or value))
  end
  for key, item in pairs(value) do
    if item == cjson.null then
      value[key] = nil
    end
  end
  return value
end

local function weight_files(folder)
  local shards = read_json(folder .. "/model.safetensors.index.json")
  local paths, seen = {}, {}
  for _, name in pairs(shards and shards.weight_map or { "model.safetensors" }) do
    if not seen[name] then
      seen[name] = true
      paths[#paths + 1] = folder .. "/" .. name
    end
  end
  table.sort(paths)
  return paths
end

-- Parameters, element types by share, and bytes of the files.
local function measure(paths)
  local weights = require("liger.model.weights")
  local files, bytes = {}, 0
  for i, path in ipairs(paths) do
    files[i] = { path = path, file = weights.open(path) }
    bytes = bytes + (file_bytes(path) or 0)
  end
  local index = weights.index(files)
  local parameters, types = 0, {}
  for _, entry in pairs(index) do
    local n = 1
    for _, size in ipairs(entry.shape) do
      n = n * size
    end
    parameters = parameters + n
    types[entry.type] = (types[entry.type] or 0) + n
  end
  local names = {}
  for name in pairs(types) do
    names[#names + 1] = name
  end
  table.sort(names, function(a, b)
    return types[a] > types[b] or types[a] == types[b] and a < b
  end)
  return { parameters = parameters, dtype = table.concat(names, ", "), bytes = bytes }, index, files
end

local function folder_tokenizer(folder)
  local description = read_json(folder .. "/tokenizer.json")
  if not description then
    return nil
  end
  local settings = read_json(folder .. "/tokenizer_config.json") or {}
  local kind = type(description.model) == "table" and description.model.type or "unknown"
  local file = folder .. "/chat_template.jinja"
  return tostring(kind), settings.chat_template ~= nil or file_bytes(file) ~= nil
end

local function describe(path)
  local config = read_json(path .. "/config.json")
  local facts, tokenizer, has_template
  if config then
    facts = measure(weight_files(path))
    tokenizer, has_template = folder_tokenizer(path)
  else
    if not file_bytes(path) then
      model_cli.fail(("%s: no such file and no folder with config.json"):format(path))
    end
    local index, files
    facts, index, files = measure({ path })
    local meta = require("liger.model").metadata(files[1].file)
    if not meta["general.architecture"] then
      model_cli.fail(path .. ": weights without a config, wanted a folder or a GGUF file")
    end
    config = require("liger.model.gguf").config(meta, index, path)
    tokenizer, has_template = meta["tokenizer.ggml.model"], meta["tokenizer.chat_template"] ~= nil
  end
  facts.architecture = config.architectures and config.architectures[1] or config.model_type
  facts.layers = config.num_hidden_layers
  facts.hidden = config.hidden_size
  facts.heads = config.num_attention_heads
  facts.kv_heads = config.num_key_value_heads
  facts.vocabulary = config.vocab_size
  facts.context = config.max_position_embeddings
  facts.tokenizer = tokenizer or "none"
  facts.chat_template = has_template or false
  return facts
end

local function with_commas(n)
  local text = ("%d"):format(n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (text:gsub("^,", ""))
end

local function print_facts(facts)
  local heads = tostring(facts.heads)
  if facts.kv_heads and facts.kv_heads ~= facts.heads then
    heads = ("%d, %d for keys and values"):format(facts.heads, facts.kv_heads)
  end
  local lines = {
    { "architecture", facts.architecture },
    { "parameters", with_commas(facts.parameters) },
    { "dtype", facts.dtype },
    { "layers", facts.layers },
    { "hidden size", facts.hidden },
    { "heads", heads },
    { "vocabulary", facts.vocabulary },
    { "context", facts.context },
    { "tokenizer", facts.tokenizer },
    { "chat template", facts.chat_template and "yes" or "no" },
    { "size on disk", ("%.1f MiB"):format(facts.bytes / 2 ^ 20) },
  }
  for _, line in ipairs(lines) do
    io.write(("%-13s  %s\n"):format(line[1], tostring(line[2] or "unknown")))
  end
end

function M.main(args, globals)
  local values, words = model_cli.parse(command, args, globals)
  if not values then
    return 0
  end
  local facts = describe(words[1])
  if values.json then
    io.write(require("liger.data.json").encode(facts), "\n")
  else
    print_facts(facts)
  end
  return 0
end

return M
