-- The tokenizers of lua/liger/data/tokenizer.lua against recorded ids, and what the Lua side adds:
-- bytes, streams, files, errors.
local helper = require("spec.helper")
local cjson = require("cjson")
local pyvalue = require("liger.data.pyvalue")
local prompts = require("liger.data.prompts")
local tokenizer = require("liger.data.tokenizer")

local function shell(command)
  assert(os.execute(command) == 0, command)
end

-- A folder as it is published: the gzipped tokenizer.json unpacked.
local function unpack_folder(folder)
  local at = os.tmpname()
  os.remove(at)
  shell(("mkdir '%s' && cp '%s'/tokenizer_config.json '%s'"):format(at, folder, at))
  shell(("gunzip -c '%s/tokenizer.json.gz' > '%s/tokenizer.json'"):format(folder, at))
  return at
end

local function remove_folder(folder)
  shell(("rm -r '%s'"):format(folder))
end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

local function with_folder(files, fn)
  local folder = os.tmpname()
  os.remove(folder)
  shell(("mkdir '%s'"):format(folder))
  for name, value in pairs(files) do
    write(folder .. "/" .. name, type(value) == "string" and value or cjson.encode(value))
  end
  fn(folder)
  remove_folder(folder)
end

local function stream_all(t, ids)
  local stream, out = t:stream(), {}
  for i, id in ipairs(ids) do
    out[i] = stream:push(id)
  end
  return table.concat(out) .. stream:finish()
end

local root = helper.golden_folder("tokenizers")
for _, name in ipairs(helper.list(root)) do
  local folder = root .. "/" .. name
  if name ~= "README.md" then
    describe("tokenizer " .. name, function()
      local t, golden, at
      setup(function()
        at = unpack_folder(folder)
        t = tokenizer.load(at)
        golden = pyvalue.decode(helper.read(folder .. "/golden.json"))
      end)
      teardown(function()
        remove_folder(at)
      end)

      it("encodes to the recorded ids", function()
        for _, case in ipairs(golden.encode) do
          assert.same({ unpack(case.ids) }, t:encode(case.text), case.text)
          local special = t:encode(case.text, { special = true })
          assert.same({ unpack(case.ids_special) }, special, case.text)
        end
      end)

      it("decodes to the recorded text, at once and id by id", function()
        for _, case in ipairs(golden.encode) do
          assert.equal(case.decoded, t:decode(case.ids))
          assert.equal(case.decoded, stream_all(t, case.ids))
          assert.equal(case.decoded_skip, t:decode(case.ids_special, { skip_special = true }))
        end
      end)

      it("renders the recorded chats", function()
        for _, case in ipairs(golden.chat) do
          local options = { tools = case.tools, add_generation_prompt = case.add_generation_prompt }
          for key, value in pairs(case.kwargs) do
            options[key] = value
          end
          if case.error then
            local ok, message = pcall(t.apply_chat_template, t, case.messages, options)
            assert.is_false(ok)
            assert.equal(case.error, message:sub(-#case.error))
          else
            assert.equal(case.text, t:apply_chat_template(case.messages, options))
          end
        end
      end)

      it("is the same after save and load", function()
        local copy = os.tmpname()
        os.remove(copy)
        shell(("mkdir '%s'"):format(copy))
        t:save(copy)
        local again = tokenizer.load(copy)
        remove_folder(copy)
        assert.equal(t.vocab, again.vocab)
        assert.equal(t.eos_id, again.eos_id)
        assert.equal(t.chat_template, again.chat_template)
        local options = { special = true }
        assert.same(t:encode("hi there", options), again:encode("hi there", options))
      end)
    end)
  end
end

describe("bytes", function()
  local t = tokenizer.bytes()

  it("have 256 ids and no special tokens", function()
    assert.equal(256, t.vocab)
    assert.is_nil(t.bos_id)
    assert.is_nil(t.eos_id)
    local all = {}
    for byte = 0, 255 do
      all[byte + 1] = string.char(byte)
    end
    local ids = t:encode(table.concat(all))
    for byte = 0, 255 do
      assert.equal(byte, ids[byte + 1])
    end
    assert.equal("h\195\169", t:decode(t:encode("h\195\169")))
  end)

  it("stream whole characters only", function()
    local stream, shown = t:stream(), {}
    for _, id in ipairs(t:encode("a\195\169\240\159\153\130b")) do
      shown[#shown + 1] = stream:push(id)
    end
    assert.same({ "a", "", "\195\169", "", "", "", "\240\159\153\130", "b" }, shown)
    assert.equal("", stream:finish())
  end)

  it("stream what is no text as U+FFFD, at the latest at the end", function()
    local stream = t:stream()
    assert.equal("", stream:push(255))
    assert.equal("\239\191\189A", stream:push(65))
    assert.equal("", stream:push(195))
    assert.equal("\239\191\189", stream:finish())
  end)
end)

-- A small description with a BOS that the post-processor adds.
local tiny = {
  added_tokens = {
    { id = 3, content = "<s>", special = true },
    { id = 4, content = "</s>", special = true },
  },
  pre_tokenizer = { type = "ByteLevel", add_prefix_space = false, use_regex = true },
  decoder = { type = "ByteLevel" },
  post_processor = {
    type = "TemplateProcessing",
    single = { { SpecialToken = { id = "<s>" } }, { Sequence = { id = "A" } } },
    special_tokens = { ["<s>"] = { ids = { 3 } } },
  },
  model = { type = "BPE", vocab = { h = 0, i = 1, hi = 2 }, merges = { "h i" } },
}

describe("folders", function()
  it("give one BOS to a rendered chat and one to plain text (B75)", function()
    local config = {
      bos_token = "<s>",
      eos_token = { content = "</s>" },
      chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}</s>{% endfor %}",
    }
    with_folder({ ["tokenizer.json"] = tiny, ["tokenizer_config.json"] = config }, function(folder)
      local t = tokenizer.load(folder)
      local copy = folder .. "/copy"
      shell(("mkdir '%s'"):format(copy))
      t:save(copy)
      for _, one in ipairs({ t, tokenizer.load(copy) }) do
        local chat = one:apply_chat_template({ { role = "user", content = "hi" } })
        assert.equal("<s>hi</s>", chat)
        assert.same({ 3, 2, 4 }, one:encode(chat))
        assert.same({ 3, 2 }, one:encode("hi", { special = true }))
        local sample = prompts.encode(one, { { role = "user", content = "hi" } })
        assert.same({ 3, 2, 4 }, sample)
      end
      assert.equal(3, t.bos_id)
      assert.equal(4, t.eos_id)
      assert.is_nil(t.pad_id)
      assert.same({ 2 }, t:encode("hi"))
      assert.equal(2, t:id("hi"))
      assert.is_nil(t:id("ho"))
      assert.equal("hi", t:token(2))
      assert.is_nil(t:token(9))
    end)
  end)

  it("may have the special tokens and the template in files of their own", function()
    with_folder({
      ["tokenizer.json"] = tiny,
      ["special_tokens_map.json"] = { eos_token = "</s>" },
      ["tokenizer_config.json"] = { chat_template = "config" },
      ["chat_template.jinja"] = "file",
    }, function(folder)
      local t = tokenizer.load(folder)
      assert.equal(4, t.eos_id)
      assert.equal("file", t:apply_chat_template({}))
    end)
  end)

  it("may have several templates, one of them for tools", function()
    local templates = {
      { name = "default", template = "d" },
      { name = "tool_use", template = "{{ tools|tojson }}" },
    }
    local config = { chat_template = templates }
    with_folder({ ["tokenizer.json"] = tiny, ["tokenizer_config.json"] = config }, function(folder)
      local t = tokenizer.load(folder)
      assert.equal("d", t:apply_chat_template({}))
      assert.equal('[{"b": 1, "a": 2}]', t:apply_chat_template("[]", { tools = '[{"b":1,"a":2}]' }))
      local tools = { { type = "function" } }
      assert.equal("d", t:apply_chat_template({}, { tools = tools, template = "default" }))
      assert.has_error(function()
        t:apply_chat_template({}, { template = "rag" })
      end, "apply_chat_template: the tokenizer has no chat template rag")
    end)
  end)
end)

describe("GGUF metadata", function()
  local function metadata(more)
    local out = {
      ["tokenizer.ggml.model"] = "gpt2",
      ["tokenizer.ggml.pre"] = "smollm",
      ["tokenizer.ggml.tokens"] = { "<s>", "</s>", "1", "2", "12", "a", "\196\160", "\196\160a" },
      ["tokenizer.ggml.merges"] = { "1 2", "\196\160 a" },
      ["tokenizer.ggml.token_type"] = { 3, 3, 1, 1, 1, 1, 1, 1 },
      ["tokenizer.ggml.bos_token_id"] = 0,
      ["tokenizer.ggml.eos_token_id"] = 1,
      ["tokenizer.chat_template"] = "{{ bos_token }}",
    }
    for key, value in pairs(more or {}) do
      out["tokenizer.ggml." .. key] = value
    end
    return out
  end

  it("make a tokenizer", function()
    local t = tokenizer.from_gguf(metadata())
    assert.same({ 0, 2, 3, 7, 1 }, t:encode("<s>12 a</s>"))
    assert.equal("12 a", t:decode({ 0, 2, 3, 7, 1 }, { skip_special = true }))
    assert.same({ 5 }, t:encode("a", { special = true }))
    assert.equal("<s>", t:apply_chat_template({}))
  end)

  it("say how words are cut and which ids are added", function()
    local both = { pre = "gpt-2", add_bos_token = true, add_eos_token = true }
    local t = tokenizer.from_gguf(metadata(both))
    assert.same({ 0, 4, 7, 1 }, t:encode("12 a", { special = true }))
    t = tokenizer.from_gguf(metadata({ pre = "llama-bpe" }))
    assert.same({ 0, 4, 7 }, t:encode("12 a", { special = true }))
  end)

  it("are refused when they are of another kind", function()
    assert.has_error(function()
      tokenizer.from_gguf(metadata({ model = "llama" }), "m.gguf")
    end, "m.gguf: tokenizer.ggml.model is llama, wanted gpt2")
    assert.has_error(function()
      tokenizer.from_gguf(metadata({ pre = "odd" }), "m.gguf")
    end, "m.gguf: tokenizer.ggml.pre is odd, wanted a known one")
    assert.has_error(function()
      tokenizer.from_gguf(metadata({ tokens = false }), "m.gguf")
    end, "m.gguf: tokenizer.ggml.tokens or merges is missing, wanted both")
  end)

  local model = os.getenv("LIGER_SMOLLM2") or ""
  if model == "" then
    print("skipped: spec/tokenizer_spec.lua: the ids of SmolLM2, LIGER_SMOLLM2 is not set")
    return
  end
  it("of SmolLM2 give the recorded ids", function()
    local t = tokenizer.load(model)
    local golden = cjson.decode(helper.read(helper.golden_folder("smollm2") .. "/golden.json"))
    for _, case in ipairs(golden.encodings) do
      assert.same(case.ids, t:encode(case.text), case.text)
    end
    for _, case in ipairs(golden.prompts) do
      assert.same(case.ids, t:encode(case.text))
      assert.equal(case.greedy_text, t:decode(case.greedy_ids))
    end
  end)
end)

describe("misuse", function()
  local t = tokenizer.bytes()
  local function fails(message, fn, ...)
    local ok, got = pcall(fn, ...)
    assert.is_false(ok)
    assert.truthy(got:find(message, 1, true), got)
  end

  it("is refused in words", function()
    fails("encode: text is a number, wanted a string", t.encode, t, 5)
    fails("encode: option bos is not known", t.encode, t, "a", { bos = true })
    fails("encode: options is a boolean, wanted a table", t.encode, t, "a", true)
    fails("decode: ids is a string, wanted a list", t.decode, t, "a")
    fails("decode: id 2 is 1.5, wanted an integer from 0", t.decode, t, { 1, 1.5 })
    fails("decode: id 1 is -1, wanted an integer from 0", t.decode, t, { -1 })
    fails("tokenizer.load: path is a nil, wanted a string", tokenizer.load)
    fails("/nowhere: has no tokenizer.json", tokenizer.load, "/nowhere")
    fails("apply_chat_template: messages is a number", t.apply_chat_template, t, 5)
    fails("the tokenizer has no chat template, wanted texts, not messages",
      t.apply_chat_template, t, {})
    fails("/nowhere/tokenizer.json: cannot be written", t.save, t, "/nowhere")
    with_folder({ ["tokenizer.json"] = "{}" }, function(folder)
      fails("tokenizer: model is missing", tokenizer.load, folder)
    end)
    with_folder({ ["tokenizer.json"] = tiny, ["tokenizer_config.json"] = "{" }, function(folder)
      fails("tokenizer_config.json: ", tokenizer.load, folder)
    end)
  end)
end)
