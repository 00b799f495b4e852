-- Tokenizers: from a Hugging Face folder, from a GGUF file's metadata, or bytes as they are. The
-- work is done by src/tokenizer.c; here are its descriptions, special tokens, streaming and chat
-- templates.
local ffi = require("ffi")
local cjson = require("cjson")
local files = require("liger.file")
local gguf = require("liger.data.tokenizer_gguf")
local json = require("liger.data.json")
local liger_ffi = require("liger.ffi")
local pyvalue = require("liger.data.pyvalue")
local template = require("liger.data.template")

local C, ctx, check, raise = liger_ffi.C, liger_ffi.ctx, liger_ffi.check, liger_ffi.raise

local M = {}

---@class liger.Tokenizer
---@field vocab integer  the largest id plus one
---@field bos_id integer?
---@field eos_id integer?
---@field pad_id integer?
---@field chat_template string?  the default one
---@field special_tokens table<string, string>  bos_token, eos_token, ... as templates name them
local Tokenizer = {}
Tokenizer.__index = Tokenizer

-- ---- opening ----

local special_names = {
  "bos_token",
  "eos_token",
  "unk_token",
  "pad_token",
  "sep_token",
  "cls_token",
  "mask_token",
}

-- `settings`: special_tokens, templates by name, and what `save` writes: texts by file name. `path`
-- is where the description comes from.
local function open(path, description, settings)
  local out = ffi.new("lg_tokenizer *[1]")
  if C.lg_tokenizer_open(ctx, description, #description, out) ~= 0 then
    files.fail(path, "%s", ffi.string(C.lg_error(ctx)))
  end
  local self = setmetatable({
    _handle = ffi.gc(out[0], C.lg_tokenizer_close),
    _ids = ffi.new("int32_t[256]"),
    _capacity = 256,
    _count = ffi.new("int64_t[1]"),
    _templates = settings.templates or {},
    _compiled = {},
    _files = settings.files,
    special_tokens = settings.special_tokens or {},
  }, Tokenizer)
  self.vocab = tonumber(C.lg_tokenizer_vocab(self._handle))
  for _, name in ipairs({ "bos", "eos", "pad" }) do
    local token = self.special_tokens[name .. "_token"]
    self[name .. "_id"] = token and self:id(token)
  end
  self.chat_template = self._templates.default
  return self
end

local function read_file(path)
  local file = io.open(path, "rb")
  if not file then
    return nil
  end
  local text = file:read("*a")
  file:close()
  return text
end

local function read_json(path)
  local text = read_file(path)
  if not text then
    return {}
  end
  local ok, value = pcall(cjson.decode, text)
  if not ok or type(value) ~= "table" then
    files.fail(path, "%s, wanted a JSON object", ok and "is a " .. type(value) or value)
  end
  return value
end

-- A token is written as its text or as an object with the text in `content`.
local function token_text(value)
  if type(value) == "table" then
    value = value.content
  end
  return type(value) == "string" and value or nil
end

local function special_tokens_of(folder, config)
  local map, found = read_json(folder .. "/special_tokens_map.json"), {}
  for _, name in ipairs(special_names) do
    found[name] = token_text(config[name]) or token_text(map[name])
  end
  return found
end

-- One template, or several by name.
local function templates_of(folder, config)
  local file = read_file(folder .. "/chat_template.jinja")
  local given, found = config.chat_template, {}
  if type(given) == "string" then
    found.default = given
  elseif type(given) == "table" then
    for _, entry in ipairs(given) do
      found[entry.name] = entry.template
    end
  end
  found.default = file or found.default
  return found
end

local saved_files = {
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
}

local function load_folder(folder)
  local description = read_file(folder .. "/tokenizer.json")
  if not description then
    files.fail(folder, "has no tokenizer.json, wanted a Hugging Face folder or a GGUF file")
  end
  local config = read_json(folder .. "/tokenizer_config.json")
  local texts = {}
  for _, name in ipairs(saved_files) do
    texts[name] = name == "tokenizer.json" and description or read_file(folder .. "/" .. name)
  end
  return open(folder, description, {
    files = texts,
    special_tokens = special_tokens_of(folder, config),
    templates = templates_of(folder, config),
  })
end

-- ---- GGUF ----

--- A tokenizer from a GGUF file's metadata.
---@param metadata table<string, any>  decoded from lg_file_metadata
---@param path? string  the file, for errors
---@return liger.Tokenizer
function M.from_gguf(metadata, path)
  path = path or "GGUF metadata"
  return open(path, gguf.describe(metadata, path))
end

local function load_gguf(path)
  local file = ffi.new("lg_file *[1]")
  liger_ffi.check_file(C.lg_file_open(ctx, path, file))
  local bytes = ffi.new("int64_t[1]")
  local text = C.lg_file_metadata(file[0], bytes)
  local metadata = cjson.decode(ffi.string(text, bytes[0]))
  C.lg_file_close(file[0])
  return M.from_gguf(metadata, path)
end

-- ---- the module's functions ----

--- Loads a tokenizer from a Hugging Face folder or from a GGUF file.
---@param path string
---@return liger.Tokenizer
function M.load(path)
  if type(path) ~= "string" then
    raise(("tokenizer.load: path is a %s, wanted a string"):format(type(path)))
  end
  local file = io.open(path, "rb")
  local magic = file and file:read(4)
  if file then
    file:close()
  end
  return magic == "GGUF" and load_gguf(path) or load_folder(path)
end

-- The character that stands for a byte in byte-level vocabularies; the same rule as lg_byte_char.
local function byte_char(byte)
  local code = byte
  if byte < 0x21 then
    code = 0x100 + byte
  elseif byte >= 0x7F and byte <= 0xA0 then
    code = 0x121 + byte - 0x7F
  elseif byte == 0xAD then
    code = 0x143
  end
  if code < 0x80 then
    return string.char(code)
  end
  return string.char(0xC0 + math.floor(code / 64), 0x80 + code % 64)
end

--- A tokenizer whose ids are bytes: a vocabulary of 256, no special tokens.
---@return liger.Tokenizer
function M.bytes()
  local vocab = {}
  for byte = 0, 255 do
    vocab[byte_char(byte)] = byte
  end
  local byte_level = { type = "ByteLevel", add_prefix_space = false, use_regex = false }
  local description = json.encode({
    version = "1.0",
    pre_tokenizer = byte_level,
    decoder = byte_level,
    model = { type = "BPE", vocab = vocab, merges = {} },
  })
  return open("bytes", description, { files = { ["tokenizer.json"] = description } })
end

-- ---- methods ----

local function check_options(what, options, allowed)
  if options ~= nil and type(options) ~= "table" then
    raise(("%s: options is a %s, wanted a table"):format(what, type(options)))
  end
  for key in pairs(options or {}) do
    if not allowed[key] then
      raise(("%s: option %s is not known"):format(what, tostring(key)))
    end
  end
  return options or {}
end

--- The id of a token's exact text, or nil.
---@param token string
---@return integer?
function Tokenizer:id(token)
  local id = C.lg_tokenizer_id(self._handle, token)
  return id >= 0 and id or nil
end

--- The text of a token as the vocabulary spells it, or nil.
---@param id integer
---@return string?
function Tokenizer:token(id)
  local text = C.lg_tokenizer_token(self._handle, id, self._count)
  return text ~= nil and ffi.string(text, self._count[0]) or nil
end

--- Encodes text. Special tokens in the text become their ids; nothing is added unless `special`
--- asks for it, so a rendered chat, which has its own BOS, is encoded as it is.
---@param text string
---@param options? { special?: boolean }  special: the tokenizer's own ids around it (BOS, EOS)
---@return integer[]
function Tokenizer:encode(text, options)
  options = check_options("encode", options, { special = true })
  if type(text) ~= "string" then
    raise(("encode: text is a %s, wanted a string"):format(type(text)))
  end
  local special = options.special and true or false
  repeat
    local ids, capacity = self._ids, self._capacity
    local handle, count = self._handle, self._count
    check(C.lg_tokenizer_encode(ctx, handle, text, #text, special, ids, capacity, count))
    local n = tonumber(count[0])
    local fits = n <= capacity
    if not fits then
      self._capacity = n
      self._ids = ffi.new("int32_t[?]", n)
    end
  until fits
  local out = {}
  for i = 0, tonumber(self._count[0]) - 1 do
    out[i + 1] = self._ids[i]
  end
  return out
end

--- Decodes ids to text; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary nothing.
---@param ids integer[]
---@param options? { skip_special?: boolean }
---@return string
function Tokenizer:decode(ids, options)
  options = check_options("decode", options, { skip_special = true })
  if type(ids) ~= "table" then
    raise(("decode: ids is a %s, wanted a list"):format(type(ids)))
  end
  local n = #ids
  local list = ffi.new("int32_t[?]", n + 1)
  for i = 1, n do
    local id = ids[i]
    if type(id) ~= "number" or id % 1 ~= 0 or id < 0 or id > 0x7FFFFFFF then
      raise(("decode: id %d is %s, wanted an integer from 0"):format(i, tostring(id)))
    end
    list[i - 1] = id
  end
  local skip = options.skip_special and true or false
  local capacity = 16 * n + 64
  while true do
    local text = ffi.new("char[?]", capacity)
    check(C.lg_tokenizer_decode(ctx, self._handle, list, n, skip, text, capacity, self._count))
    local bytes = tonumber(self._count[0])
    if bytes <= capacity then
      return ffi.string(text, bytes)
    end
    capacity = bytes
  end
end

-- ---- streaming ----

---@class liger.TokenStream
---@field _window integer[]  ids that the next text depends on: the last text's, and those after it
---@field _shown string  the text of the window that has been returned
local Stream = {}
Stream.__index = Stream

local FFFD = "\239\191\189"

-- Up to the trailing U+FFFD, which may be characters that are not complete yet.
local function complete(text)
  local to = #text
  while text:sub(to - 2, to) == FFFD do
    to = to - 3
  end
  return text:sub(1, to)
end

--- Takes one more id and returns the text that is complete now, "" when there is none.
---@param id integer
---@return string
function Stream:push(id)
  local window = self._window
  window[#window + 1] = id
  local text = self._tokenizer:decode(window, self._options)
  local stable = complete(text)
  if #stable <= #self._shown then
    return ""
  end
  local new = stable:sub(#self._shown + 1)
  self._shown = stable
  if stable == text then
    -- Only the ids of this last text stay: decoders look back at what stands before.
    local rest = {}
    for i = self._from, #window do
      rest[#rest + 1] = window[i]
    end
    self._window, self._from = rest, #rest + 1
    self._shown = self._tokenizer:decode(rest, self._options)
  end
  return new
end

--- Ends the stream and returns what was held back, with U+FFFD for what never became complete.
---@return string
function Stream:finish()
  local text = self._tokenizer:decode(self._window, self._options):sub(#self._shown + 1)
  self._window, self._shown, self._from = {}, "", 1
  return text
end

--- An object that turns ids into text one by one and never cuts a character: `push(id)`, then
--- `finish()`.
---@param options? { skip_special?: boolean }
---@return liger.TokenStream
function Tokenizer:stream(options)
  options = check_options("stream", options, { skip_special = true })
  return setmetatable({
    _tokenizer = self,
    _options = options,
    _window = {},
    _shown = "",
    _from = 1,
  }, Stream)
end

-- ---- chat ----

-- A JSON text keeps the order of its keys, a table is taken as it is.
local function value_of(what, value)
  if type(value) == "string" then
    value = pyvalue.decode(value)
  end
  if type(value) ~= "table" then
    raise(("apply_chat_template: %s is a %s, wanted a list or its JSON"):format(what, type(value)))
  end
  return value
end

-- The compiled template of a name; with tools, "tool_use" if there is one.
local function find_template(self, name, has_tools)
  name = name or (has_tools and self._templates.tool_use and "tool_use") or "default"
  local source = name == "default" and self.chat_template or self._templates[name]
  if not source and not self.chat_template and not next(self._templates) then
    raise("apply_chat_template: the tokenizer has no chat template, wanted texts, not messages")
  elseif not source then
    raise(("apply_chat_template: the tokenizer has no chat template %s"):format(name))
  end
  if not self._compiled[source] then
    self._compiled[source] = template.compile(source)
  end
  return self._compiled[source]
end

--- Renders messages with the model's own chat template.
---@param messages table[]|string  { role = ..., content = ... } each, or their JSON
---@param options? table  tools (a list or its JSON), add_generation_prompt, template (a name);
---  all else goes to the template
---@return string
function Tokenizer:apply_chat_template(messages, options)
  local none = pyvalue.none
  local variables = { tools = none, documents = none, add_generation_prompt = false }
  for key, value in pairs(self.special_tokens) do
    variables[key] = value
  end
  for key, value in pairs(options or {}) do
    variables[key] = value
  end
  variables.template = nil
  variables.messages = value_of("messages", messages)
  local has_tools = variables.tools ~= pyvalue.none
  if has_tools then
    variables.tools = value_of("tools", variables.tools)
  end
  return find_template(self, options and options.template, has_tools):render(variables)
end

--- The tokenizer's files (tokenizer.json and what belongs to it) as texts by name.
---@return table<string, string>
function Tokenizer:files()
  return self._files
end

--- Writes the tokenizer's files (tokenizer.json and what belongs to it) into a folder that exists.
---@param folder string
function Tokenizer:save(folder)
  for name, text in pairs(self._files) do
    local path = folder .. "/" .. name
    local file, message = io.open(path, "wb")
    if not file then
      files.fail(path, "cannot be written: %s", message)
    end
    local written = file:write(text)
    if not file:close() or not written then
      files.fail(path, "cannot be written in whole")
    end
  end
end

return M
