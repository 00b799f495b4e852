-- Writes the description (as tokenizer.json has it) of a tokenizer that a GGUF file's metadata
-- gives: tokens, merges, and by name how words are cut.
local cjson = require("cjson")
local json = require("liger.data.json")
local fail = require("liger.file").fail

local M = {}

local function split_by(regex)
  return { type = "Split", pattern = { Regex = regex }, behavior = "Isolated", invert = false }
end

local function byte_level(use_regex)
  return {
    type = "ByteLevel",
    add_prefix_space = false,
    trim_offsets = true,
    use_regex = use_regex,
  }
end

local contraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
local tail = "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
local upper, lower = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]", "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"

-- Words by their case, as Mistral's tekken and OpenAI's o200k cut them.
local function cased(suffix, numbers)
  local head = "[^\\r\\n\\p{L}\\p{N}]?"
  local first = head .. upper .. "*" .. lower .. "+" .. suffix
  local second = head .. upper .. "+" .. lower .. "*" .. suffix
  local marks = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*"
  return table.concat({ first, second, numbers, marks }, "|") .. tail
end

local function worded(numbers)
  local letters, marks = "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
  return table.concat({ contraction, letters, numbers, marks }, "|") .. tail
end

-- tokenizer.ggml.pre: how words are cut; `ignore_merges` and whether a BOS is added when the file
-- does not say.
local gpt2 = { steps = { byte_level(true) } }
local llama3 = {
  steps = { split_by(worded("\\p{N}{1,3}")), byte_level(false) },
  ignore_merges = true,
  bos = true,
}
local pre_tokenizers = {
  ["default"] = gpt2,
  ["gpt-2"] = gpt2,
  ["smollm"] = { steps = { { type = "Digits", individual_digits = true }, byte_level(true) } },
  ["qwen2"] = {
    steps = { split_by(worded("\\p{N}")), byte_level(false) },
    normalizer = { type = "NFC" },
  },
  ["llama-bpe"] = llama3,
  ["llama3"] = llama3,
  ["tekken"] = {
    steps = { split_by(cased("", "\\p{N}")), byte_level(false) },
    ignore_merges = true,
    bos = true,
  },
  ["gpt-4o"] = {
    steps = { split_by(cased(contraction .. "?", "\\p{N}{1,3}")), byte_level(false) },
    ignore_merges = true,
  },
}

local CONTROL, USER_DEFINED = 3, 4

local function gguf_vocab(tokens)
  local out = {}
  for i, token in ipairs(tokens) do
    out[i] = cjson.encode(token) .. ":" .. (i - 1)
  end
  return "{" .. table.concat(out, ",") .. "}"
end

local function gguf_added(tokens, types)
  local added = {}
  for i, kind in ipairs(types) do
    if kind == CONTROL or kind == USER_DEFINED then
      local special = kind == CONTROL
      added[#added + 1] = { id = i - 1, content = tokens[i], special = special, normalized = false }
    end
  end
  return added
end

local function gguf_template(special, add_bos, add_eos, ids)
  local single, tokens = {}, {}
  local function add(name)
    local token = special[name .. "_token"]
    single[#single + 1] = { SpecialToken = { id = token, type_id = 0 } }
    tokens[token] = { id = token, ids = { ids[name] }, tokens = { token } }
  end
  if add_bos and special.bos_token then
    add("bos")
  end
  single[#single + 1] = { Sequence = { id = "A", type_id = 0 } }
  if add_eos and special.eos_token then
    add("eos")
  end
  if #single == 1 then
    return cjson.null
  end
  return { type = "TemplateProcessing", single = single, pair = {}, special_tokens = tokens }
end

--- The description, and the settings that tokenizer.lua opens it with.
---@param metadata table<string, any>  decoded from lg_file_metadata
---@param path string  the file, for errors
---@return string description
---@return table settings  special_tokens, templates, files
function M.describe(metadata, path)
  local function get(key)
    return metadata["tokenizer.ggml." .. key]
  end
  if get("model") ~= "gpt2" then
    fail(path, "tokenizer.ggml.model is %s, wanted gpt2", tostring(get("model")))
  end
  local name = get("pre") or "default"
  local pre = pre_tokenizers[name]
  if not pre then
    fail(path, "tokenizer.ggml.pre is %s, wanted a known one", tostring(name))
  end
  local tokens, merges, types = get("tokens"), get("merges"), get("token_type") or {}
  if type(tokens) ~= "table" or type(merges) ~= "table" then
    fail(path, "tokenizer.ggml.tokens or merges is missing, wanted both")
  end
  local special, ids = {}, {}
  for short, key in pairs({ bos = "bos", eos = "eos", pad = "padding", unk = "unknown" }) do
    local id = get(key .. "_token_id")
    special[short .. "_token"], ids[short] = id and tokens[id + 1], id
  end
  local add_bos = get("add_bos_token")
  if add_bos == nil then
    add_bos = pre.bos
  end
  local head = json.encode({
    version = "1.0",
    added_tokens = gguf_added(tokens, types),
    normalizer = pre.normalizer or cjson.null,
    pre_tokenizer = { type = "Sequence", pretokenizers = pre.steps },
    post_processor = gguf_template(special, add_bos, get("add_eos_token"), ids),
    decoder = byte_level(true),
  })
  local model = ('{"type":"BPE","ignore_merges":%s,"vocab":%s,"merges":%s}'):format(
    tostring(pre.ignore_merges or false),
    gguf_vocab(tokens),
    #merges > 0 and cjson.encode(merges) or "[]"
  )
  local description = head:sub(1, -2) .. ',"model":' .. model .. "}"
  local chat = metadata["tokenizer.chat_template"]
  local config = { tokenizer_class = "PreTrainedTokenizerFast", chat_template = chat }
  for key, token in pairs(special) do
    config[key] = token
  end
  return description, {
    files = { ["tokenizer.json"] = description, ["tokenizer_config.json"] = json.encode(config) },
    special_tokens = special,
    templates = { default = chat },
  }
end

return M
