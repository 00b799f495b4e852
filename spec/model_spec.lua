local helper = require("spec.helper")
local cjson = require("cjson")
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local loader = require("liger.model")
local pack = require("liger.nn.pack")
local Tensor = require("liger.tensor")
local weights = require("liger.model.weights")

local FOLDER = helper.golden_folder("models")
local BUILT = { llama = true, qwen3 = true }

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

-- Runs fn with an empty folder, which is removed afterwards.
local function in_folder(each)
  local folder = os.tmpname()
  os.remove(folder)
  assert(os.execute(("mkdir %q"):format(folder)))
  local ok, message = pcall(each, folder)
  os.execute(("rm -r %q"):format(folder))
  if not ok then
    error(message, 0)
  end
end

local TINY = {
  model_type = "llama",
  vocab_size = 12,
  hidden_size = 8,
  num_hidden_layers = 2,
  num_attention_heads = 2,
  num_key_value_heads = 1,
  intermediate_size = 12,
  max_position_embeddings = 32,
}

local function tiny(changes)
  local config = {}
  for _, from in ipairs({ TINY, changes or {} }) do
    for key, value in pairs(from) do
      config[key] = value
    end
  end
  return config
end

-- A model with random weights, norms and biases among them.
local function random_model(changes, dtype)
  local model = loader.from_config(tiny(changes), { dtype = dtype }):init(3, 0.4)
  for i, p in ipairs(model.list) do
    if #p.tensor.shape == 1 then
      autograd.no_grad(function()
        p.tensor:copy_(helper.normal(40 + i, p.tensor.shape, model.dtype) * 0.3 + 1)
      end)
    end
  end
  return model
end

-- Writes tensors { name, tensor } as a model's folder.
local function write_folder(folder, config, named)
  weights.write(folder .. "/model.safetensors", named)
  write(folder .. "/config.json", cjson.encode(config))
end

local function without(list, ...)
  local kept = {}
  for _, w in ipairs(list) do
    local drop = false
    for _, name in ipairs({ ... }) do
      drop = drop or w.name == name
    end
    if not drop then
      kept[#kept + 1] = w
    end
  end
  return kept
end

-- ---- recorded models ----

local not_built = {}

local function recorded_model(name)
  local folder = FOLDER .. "/" .. name
  local t = helper.read_tensors(folder .. "/golden.safetensors")
  local model = loader.load(folder)
  local ids, labels = t["input_ids"]:to_table(), t["labels"]:to_table()
  local B, T = #ids, #ids[1]
  local batch = pack.sequences(ids)
  -- Position i predicts label i + 1.
  local target, kept = batch.target:data(), 0
  for b = 1, B do
    for i = 1, T do
      local label = labels[b][i + 1] or -100
      target[(b - 1) * T + i - 1] = label
      kept = kept + (label ~= -100 and 1 or 0)
    end
  end
  return model, batch, kept, t, folder
end

for _, name in ipairs(helper.list(FOLDER)) do
  local text = helper.exists(FOLDER .. "/" .. name .. "/config.json")
    and helper.read(FOLDER .. "/" .. name .. "/config.json")
  local config = text and cjson.decode(text)
  if config and not BUILT[config.model_type] then
    not_built[#not_built + 1] = name
  elseif config then
    describe("the recorded model " .. name, function()
      it("has its logits", function()
        local model, batch, _, t = recorded_model(name)
        helper.close(model:logits(batch), t["logits"], 1e-4)
      end)

      it("has its loss and every gradient", function()
        local model, batch, kept, t = recorded_model(name)
        local loss = model:cross_entropy(batch, 1 / kept)
        loss:backward()
        helper.close(loss, t["loss"], 1e-4)
        local compared = 0
        for key, gradient in pairs(t) do
          local parameter = key:match("^grad%.(.+)")
          if parameter then
            local got = assert(model:grad_of(parameter), parameter .. " has no gradient")
            helper.close(got, gradient, 1e-4, parameter)
            compared = compared + 1
          end
        end
        assert.equal(#model:named_weights(), compared)
      end)

      it("has them through log-probabilities too", function()
        local model, batch, kept, t = recorded_model(name)
        local logp = model:logprob(batch)
        local loss = fn.sum(logp) * (-1 / kept)
        loss:backward()
        helper.close(loss, t["loss"], 1e-4)
        for key, gradient in pairs(t) do
          local parameter = key:match("^grad%.(.+)")
          if parameter then
            helper.close(model:grad_of(parameter), gradient, 1e-4, parameter)
          end
        end
      end)

      it("is the same after it was saved and loaded", function()
        local model, batch, _, _, folder = recorded_model(name)
        local logits = model:logits(batch)
        in_folder(function(copy)
          loader.save(model, copy .. "/deep/er")
          local again = loader.load(copy .. "/deep/er")
          helper.same(again:logits(batch), logits)
          local names = helper.read_tensors(copy .. "/deep/er/model.safetensors")
          local original = helper.read_tensors(folder .. "/model.safetensors")
          for key, tensor in pairs(original) do
            helper.same(names[key], tensor, key)
            names[key] = nil
          end
          assert.is_nil(next(names))
        end)
      end)

      it("is close to itself in bf16", function()
        local _, batch, _, t, folder = recorded_model(name)
        local model = loader.load(folder, { dtype = "bf16" })
        assert.equal("bf16", model.weights.embed.dtype)
        helper.close(model:logits(batch), t["logits"], 0.05)
      end)
    end)
  end
end
if #not_built > 0 then
  print("\nmodel_spec: not built, not compared: " .. table.concat(not_built, ", "))
end

-- ---- tied embeddings ----

describe("tied embeddings", function()
  local EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

  it("B61: load from either name and share one tensor; without both the key is named", function()
    local config = tiny({ tie_word_embeddings = true })
    local model = random_model({ tie_word_embeddings = true })
    local logits, named = model:logits({ 1, 2, 3 }), model:named_weights()
    for _, name in ipairs({ EMBED, HEAD }) do
      in_folder(function(folder)
        local list = without(named, EMBED)
        list[#list + 1] = { name = name, tensor = model.weights.embed }
        write_folder(folder, config, list)
        local loaded = loader.load(folder)
        assert.equal(loaded.weights.embed, loaded.weights.head)
        helper.same(loaded:logits({ 1, 2, 3 }), logits, name)
        assert.equal(model:num_parameters(), loaded:num_parameters())
      end)
    end
    in_folder(function(folder)
      write_folder(folder, config, without(named, EMBED))
      helper.raises(function()
        loader.load(folder)
      end, folder, "tensor " .. EMBED .. " is missing")
    end)
  end)

  it("B61: are saved once", function()
    local model = random_model({ tie_word_embeddings = true })
    in_folder(function(folder)
      loader.save(model, folder)
      local tensors = helper.read_tensors(folder .. "/model.safetensors")
      assert.is_nil(tensors[HEAD])
      helper.same(tensors[EMBED], helper.to(model.weights.embed, "f32"))
      helper.same(loader.load(folder):logits({ 5, 0, 11 }), model:logits({ 5, 0, 11 }))
    end)
  end)

  it("get the gradients of the embedding and of the head in one tensor", function()
    local model = random_model({ tie_word_embeddings = true }, "f64")
    local open = random_model({ tie_word_embeddings = false }, "f64")
    local by_name = {}
    for _, w in ipairs(model:named_weights()) do
      by_name[w.name] = w.tensor
    end
    autograd.no_grad(function()
      for _, w in ipairs(open:named_weights()) do
        w.tensor:copy_(by_name[w.name] or model.weights.embed)
      end
    end)
    local batch = pack.sequences({ { 1, 5, 2, 7 }, { 3, 3 } })
    for _, m in ipairs({ model, open }) do
      fn.sum((m:logprob(batch))):backward()
    end
    autograd.no_grad(function()
      helper.close(model:grad_of(EMBED), open:grad_of(EMBED) + open:grad_of(HEAD), 1e-12)
    end)
  end)
end)

-- ---- refusals ----

describe("loading", function()
  local model = random_model()
  local named = model:named_weights()

  local function refused(config, list, ...)
    local texts = { ... }
    in_folder(function(folder)
      write_folder(folder, config, list)
      helper.raises(function()
        loader.load(folder)
      end, unpack(texts))
    end)
  end

  it("refuses a missing, an extra and a misshaped tensor by name", function()
    refused(TINY, without(named, "model.norm.weight"), "tensor model.norm.weight is missing")
    refused(TINY, without(named, "lm_head.weight"), "tensor lm_head.weight is missing")
    local key = "model.layers.1.self_attn.k_proj.weight"
    refused(TINY, without(named, key), ("tensor %s is missing"):format(key))
    local extra = without(named)
    extra[#extra + 1] = { name = "model.layers.2.mlp.up_proj.weight", tensor = fn.zeros(12, 8) }
    refused(TINY, extra, "model.layers.2.mlp.up_proj.weight is in the file and not in the model")
    local misshaped = without(named, key)
    misshaped[#misshaped + 1] = { name = key, tensor = fn.zeros(8, 4) }
    refused(TINY, misshaped, key .. " is [8,4], wanted [4,8] as the config says")
    refused(tiny({ vocab_size = 13 }), named, "model.embed_tokens.weight is [12,8], wanted [13,8]")
  end)

  it("passes over stored rope frequencies", function()
    local list = without(named)
    list[#list + 1] = {
      name = "model.layers.0.self_attn.rotary_emb.inv_freq", tensor = fn.zeros(2),
    }
    in_folder(function(folder)
      write_folder(folder, TINY, list)
      helper.same(loader.load(folder):logits({ 1, 2 }), model:logits({ 1, 2 }))
    end)
  end)

  it("reads shards by their index, and refuses a tensor that is in two", function()
    in_folder(function(folder)
      local first, second, map = {}, {}, {}
      for i, w in ipairs(named) do
        local shard = i % 2 == 0 and first or second
        shard[#shard + 1] = w
        map[w.name] = i % 2 == 0 and "a.safetensors" or "b.safetensors"
      end
      write_folder(folder, TINY, first)
      os.rename(folder .. "/model.safetensors", folder .. "/a.safetensors")
      write_folder(folder, TINY, second)
      os.rename(folder .. "/model.safetensors", folder .. "/b.safetensors")
      write(folder .. "/model.safetensors.index.json", cjson.encode({ weight_map = map }))
      helper.same(loader.load(folder):logits({ 1, 2 }), model:logits({ 1, 2 }))
      first[#first + 1] = second[1]
      write_folder(folder, TINY, first)
      os.rename(folder .. "/model.safetensors", folder .. "/a.safetensors")
      helper.raises(function()
        loader.load(folder)
      end, "b.safetensors: tensor " .. second[1].name .. " is in", "a.safetensors too")
      write(folder .. "/model.safetensors.index.json", '{"weight_map": "a.safetensors"}')
      helper.raises(function()
        loader.load(folder)
      end, "index.json: weight_map is a string, wanted an object")
    end)
  end)

  it("names a folder or file that is not there or not a model", function()
    in_folder(function(folder)
      helper.raises(function()
        loader.load(folder .. "/none")
      end, folder .. "/none: no such file or folder")
      helper.raises(function()
        loader.load(folder)
      end, folder, "wanted a folder with config.json or a GGUF file")
      write(folder .. "/notes.txt", "no model")
      helper.raises(function()
        loader.load(folder .. "/notes.txt")
      end, "neither a model folder nor a GGUF file")
      write(folder .. "/config.json", "[1, 2")
      helper.raises(function()
        loader.load(folder)
      end, "config.json: not a JSON object")
      write(folder .. "/config.json", "7")
      helper.raises(function()
        loader.load(folder)
      end, "config.json: not a JSON object: number")
      write(folder .. "/config.json", cjson.encode(TINY))
      helper.raises(function()
        loader.load(folder)
      end, folder .. "/model.safetensors")
      write(folder .. "/model.safetensors", "short")
      helper.raises(function()
        loader.load(folder)
      end, folder .. "/model.safetensors")
    end)
  end)

  it("refuses options that it does not have and dtypes that no weight can have", function()
    local folder = FOLDER .. "/llama3"
    for _, case in ipairs({
      { { type = "bf16" }, "load: unknown option type" },
      { { dtype = "int8" }, "tensor: dtype is int8" },
      { { dtype = "i32" }, "tensor is i32, wanted a float dtype" },
    }) do
      helper.raises(function()
        loader.load(folder, case[1])
      end, case[2])
    end
    helper.raises(function()
      loader.load()
    end, "load: path is a nil, wanted a string")
  end)

  it("treats JSON null as absent", function()
    in_folder(function(folder)
      local config = tiny({
        rope_scaling = cjson.null, num_key_value_heads = 1, head_dim = cjson.null,
      })
      write_folder(folder, config, named)
      helper.same(loader.load(folder):logits({ 1, 2 }), model:logits({ 1, 2 }))
    end)
  end)

  it("collects the stop ids of config and generation config", function()
    in_folder(function(folder)
      write_folder(folder, tiny({ eos_token_id = 7 }), named)
      assert.same({ 7 }, loader.load(folder).stop_ids)
      write(folder .. "/generation_config.json", '{"eos_token_id": [9, 7]}')
      assert.same({ 9, 7 }, loader.load(folder).stop_ids)
    end)
  end)
end)

describe("a config", function()
  local function refused(changes, ...)
    local config = tiny(changes)
    for key, value in pairs(changes) do
      if value == "absent" then
        config[key] = nil
      end
    end
    helper.raises(function()
      loader.from_config(config)
    end, ...)
  end

  it("of another architecture is refused", function()
    refused({ model_type = "mamba" }, "model_type is mamba, wanted llama or qwen3")
    refused({ model_type = "absent" }, "model_type is nil")
  end)

  it("needs whole sizes from 1", function()
    local needed = {
      "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    }
    for _, key in ipairs(needed) do
      for _, bad in ipairs({ "absent", 0, -3, 2.5, 2 ^ 40, "16", true, 0 / 0, math.huge }) do
        refused({ [key] = bad }, key .. " is ", "wanted a whole number from 1")
      end
    end
    for _, key in ipairs({ "num_key_value_heads", "head_dim", "max_position_embeddings" }) do
      for _, bad in ipairs({ 0, -3, 2.5, "16", false, {} }) do
        refused({ [key] = bad }, key .. " is ", "wanted a whole number from 1")
      end
    end
  end)

  it("needs heads that divide", function()
    refused({ num_attention_heads = 3 }, "head size is 2.66667, wanted an even whole number")
    refused({ head_dim = 3 }, "head size is 3")
    refused({ num_attention_heads = 4, num_key_value_heads = 3 }, "4 heads over 3 key/value heads")
  end)

  it("is refused for settings that would be passed over", function()
    refused({ hidden_act = "gelu" }, "hidden_act is gelu, wanted silu")
    refused({ use_sliding_window = true }, "use_sliding_window is true, wanted none for llama")
    refused({ use_sliding_window = 1 }, "use_sliding_window is 1, wanted true or false")
    refused({ sliding_window = 4096 }, "sliding_window is 4096, wanted none for llama")
    refused({ layer_types = { "full_attention", "sliding_attention" } },
      "layer_types[1] is sliding_attention, wanted full_attention")
    refused({ layer_types = { "full_attention" } }, "layer_types has 1 entries, wanted 2")
    refused({ layer_types = "full_attention" }, "layer_types has no entries, wanted 2")
    refused({ attn_logit_softcapping = 50 },
      "attn_logit_softcapping is 50, wanted none for llama")
    local function qwen3(changes, ...)
      changes.model_type = "qwen3"
      refused(changes, ...)
    end
    qwen3({ attn_logit_softcapping = 50 }, "attn_logit_softcapping is 50, wanted none for qwen3")
    qwen3({ use_sliding_window = true, sliding_window = 0 },
      "sliding_window is 0, wanted a whole number from 1")
    qwen3({ use_sliding_window = true, max_window_layers = 0.5 },
      "max_window_layers is 0.5, wanted a whole number from 0")
    qwen3({ layer_types = { "full_attention", "sliding_attention" } },
      "layer_types[1] is sliding_attention, wanted full_attention")
    qwen3({ use_sliding_window = true, layer_types = { "full_attention", "linear_attention" } },
      "layer_types[1] is linear_attention, wanted full_attention or sliding_attention")
    refused({ rms_norm_eps = "1e-6" }, "rms_norm_eps is 1e-6")
    refused({ rms_norm_eps = 0 }, "rms_norm_eps is 0")
    refused({ tie_word_embeddings = "yes" }, "tie_word_embeddings is yes, wanted true or false")
    refused({ attention_bias = 1 }, "attention_bias is 1, wanted true or false")
    refused({ rope_scaling = { rope_type = "ntk" } }, "rope type is ntk")
  end)

  it("names the layers that see their last keys alone", function()
    local function windows(changes)
      changes.model_type = "qwen3"
      return loader.from_config(tiny(changes)).shape.windows
    end
    assert.same({ 0, 0 }, windows({}))
    assert.same({ 0, 0 }, windows({ use_sliding_window = false, sliding_window = 5,
      max_window_layers = 0 }))
    assert.same({ 0, 0 }, windows({ use_sliding_window = true, sliding_window = 5 }))
    assert.same({ 0, 5 }, windows({ use_sliding_window = true, sliding_window = 5,
      max_window_layers = 1 }))
    assert.same({ 4096, 0 }, windows({ use_sliding_window = true,
      layer_types = { "sliding_attention", "full_attention" } }))
    assert.same({ 0, 0 }, windows({ layer_types = { "full_attention", "full_attention" } }))
  end)

  it("is named by its path in a folder, without a line of Lua", function()
    in_folder(function(folder)
      local function message_of(config)
        write_folder(folder, tiny(config), random_model():named_weights())
        return select(2, pcall(loader.load, folder))
      end
      assert.equal(folder .. "/config.json: model_type is mamba, wanted llama or qwen3",
        message_of({ model_type = "mamba" }))
      assert.equal(folder .. "/model.safetensors: tensor model.embed_tokens.weight is [12,8], "
        .. "wanted [13,8] as the config says", message_of({ vocab_size = 13 }))
      write(folder .. "/model.safetensors", "short")
      assert.equal(folder .. "/model.safetensors: ", select(2, pcall(loader.load, folder)):sub(
        1, #folder + 20))
    end)
  end)
end)

describe("saving", function()
  it("writes the dtype that the weights have, under the name that the config uses", function()
    for _, key in ipairs({ "torch_dtype", "dtype" }) do
      local model = random_model({ [key] = "float32" }, "bf16")
      in_folder(function(folder)
        loader.save(model, folder)
        local config = cjson.decode(helper.read(folder .. "/config.json"))
        assert.equal("bfloat16", config[key])
        assert.equal(1, (config.torch_dtype and 1 or 0) + (config.dtype and 1 or 0))
        local tensors = helper.read_tensors(folder .. "/model.safetensors")
        assert.equal("bf16", tensors["model.norm.weight"].dtype)
        helper.same(loader.load(folder, { dtype = "bf16" }):logits({ 1 }), model:logits({ 1 }))
      end)
    end
  end)

  it("keeps the stop ids and the rest of generation_config.json", function()
    in_folder(function(folder)
      local model = random_model()
      model.stop_ids = { 4, 2 }
      loader.save(model, folder .. "/a")
      local first = loader.load(folder .. "/a")
      assert.same({ 4, 2 }, first.stop_ids)
      first.generation_config.temperature = 0.6
      loader.save(first, folder .. "/b")
      local second = loader.load(folder .. "/b")
      assert.same({ 4, 2 }, second.stop_ids)
      assert.equal(0.6, second.generation_config.temperature)
    end)
  end)

  it("writes the tokenizer's files beside the model", function()
    in_folder(function(folder)
      loader.save(random_model(), folder, {
        files = function()
          return { ["tokenizer.json"] = "{}" }
        end,
      })
      assert.equal("{}", helper.read(folder .. "/tokenizer.json"))
    end)
  end)

  it("says what could not be made or written", function()
    in_folder(function(folder)
      write(folder .. "/file", "")
      helper.raises(function()
        loader.save(random_model(), folder .. "/file/model")
      end, folder .. "/file/model: cannot be made")
      os.execute(("mkdir -p %q"):format(folder .. "/config.json.part"))
      helper.raises(function()
        loader.save(random_model(), folder)
      end, folder .. "/config.json: cannot be written")
    end)
  end)
end)

describe("a model", function()
  it("starts with normal matrices, norms of 1 and biases of 0, by its seed", function()
    local function new(seed)
      local config = tiny({ attention_bias = true, mlp_bias = true, vocab_size = 500 })
      return loader.from_config(config):init(seed, 0.1)
    end
    local a, b, c = new(1), new(1), new(2)
    for i, p in ipairs(a.list) do
      helper.same(helper.to(p.tensor, "f32"), helper.to(b.list[i].tensor, "f32"))
      if #p.tensor.shape == 1 then
        local wanted = p.name:find("bias$") and 0 or 1
        helper.close(p.tensor, fn.full(wanted, p.tensor.shape[1]), 0, p.name)
      else
        assert.is_false(
          helper.is_same(helper.to(p.tensor, "f32"), helper.to(c.list[i].tensor, "f32"))
        )
      end
    end
    local squares = fn.sum(a.weights.embed * a.weights.embed):item()
    helper.close(math.sqrt(squares / (500 * 8)), 0.1, 0.005)
  end)

  it("is copied with its own memory and without gradients", function()
    local model = random_model({ tie_word_embeddings = true })
    model.stop_ids = { 3 }
    local copy, before = model:copy(), model:logits({ 1, 2, 3 })
    helper.same(copy:logits({ 1, 2, 3 }), before)
    assert.same({ 3 }, copy.stop_ids)
    assert.is_false(copy:logits({ 1 }).requires_grad or false)
    for _, p in ipairs(model.list) do
      p.tensor:fill_(0)
    end
    helper.same(copy:logits({ 1, 2, 3 }), before)
  end)

  it("counts its parameters and names every weight once", function()
    local model = random_model({ attention_bias = true, mlp_bias = true })
    local total, seen = 0, {}
    for _, w in ipairs(model:named_weights()) do
      assert.is_nil(seen[w.name])
      seen[w.name] = true
      total = total + w.tensor:numel()
    end
    assert.equal(total, model:num_parameters())
    for _, kind in ipairs({ "q", "k", "v", "o" }) do
      assert.is_true(seen["model.layers.0.self_attn." .. kind .. "_proj.bias"])
    end
    for _, kind in ipairs({ "gate", "up", "down" }) do
      assert.is_true(seen["model.layers.1.mlp." .. kind .. "_proj.bias"])
    end
    assert.is_nil(model:grad_of("model.norm.weight"))
    assert.is_nil(model:grad_of("nothing"))
  end)

  it("gives the logits of one list of ids or of a packed batch", function()
    local model = random_model()
    local both = model:logits(pack.sequences({ { 1, 2, 3 }, { 4, 5 } }))
    helper.same(both:narrow(1, 1, 3), model:logits({ 1, 2, 3 }))
    helper.same(both:narrow(1, 4, 2), model:logits({ 4, 5 }))
    assert.equal("[5,12]", Tensor.shape_text(both.shape))
  end)

  it("refuses ids outside its vocabulary", function()
    for _, bad in ipairs({ -1, 12 }) do
      helper.raises(function()
        random_model():logits({ 1, bad })
      end, "embedding:", tostring(bad))
    end
  end)
end)

describe("a GGUF file", function()
  local gguf = require("liger.model.gguf")
  local META = {
    ["general.architecture"] = "qwen3",
    ["qwen3.embedding_length"] = 8,
    ["qwen3.block_count"] = 2,
    ["qwen3.attention.head_count"] = 2,
    ["qwen3.feed_forward_length"] = 12,
    ["qwen3.attention.layer_norm_rms_epsilon"] = 1e-6,
    ["qwen3.context_length"] = 64,
    ["tokenizer.ggml.eos_token_id"] = 9,
  }

  local function meta(changes)
    local y = {}
    for _, from in ipairs({ META, changes or {} }) do
      for key, value in pairs(from) do
        y[key] = value
      end
    end
    return y
  end

  it("describes its config", function()
    local config = gguf.config(META, { ["token_embd.weight"] = { shape = { 30, 8 } } }, "m.gguf")
    assert.equal("qwen3", config.model_type)
    assert.equal(30, config.vocab_size)
    assert.equal(2, config.num_key_value_heads)
    assert.equal(4, config.head_dim)
    assert.equal(9, config.eos_token_id)
    assert.equal(10000, config.rope_theta)
    assert.is_true(config.tie_word_embeddings)
    local index = { ["token_embd.weight"] = { shape = { 30, 8 } }, ["output.weight"] = {} }
    local set = meta({ ["qwen3.attention.key_length"] = 6, ["qwen3.attention.head_count_kv"] = 1 })
    config = gguf.config(set, index, "m.gguf")
    assert.equal(6, config.head_dim)
    assert.equal(1, config.num_key_value_heads)
    assert.is_false(config.tie_word_embeddings)
    assert.equal(4, loader.from_config(gguf.config(META, index, "m.gguf")).shape.head_dim)
  end)

  it("is refused for what is not read", function()
    local index = { ["token_embd.weight"] = { shape = { 30, 8 } } }
    local function refused(changes, tensors, ...)
      helper.raises(function()
        gguf.config(meta(changes), tensors, "m.gguf")
      end, ...)
    end
    refused({
      ["general.architecture"] = "gemma3",
    }, index, "m.gguf: architecture is gemma3, wanted llama or qwen3")
    refused({ ["general.architecture"] = "llama" }, index, "m.gguf: metadata has no llama.")
    refused({}, {}, "m.gguf: tensor token_embd.weight is missing")
    local scaled = {
      ["token_embd.weight"] = index["token_embd.weight"], ["rope_freqs.weight"] = {},
    }
    refused({}, scaled, "m.gguf: rope_freqs.weight: scaled rope from GGUF is not read")
    refused({
      ["qwen3.rope.scaling.type"] = "yarn",
    }, index, "m.gguf: qwen3.rope.scaling.type is yarn, wanted no scaled rope; use the safetensors")
    refused({ ["qwen3.rope.scaling.factor"] = 4 }, index, "qwen3.rope.scaling.factor is 4")
    refused({ ["qwen3.attention.sliding_window"] = 64 }, index, "sliding_window is 64, wanted no")
    refused({ ["qwen3.rope.dimension_count"] = 2 }, index, "count is 2, wanted the head's 4")
    gguf.config(
      meta({ ["qwen3.rope.scaling.type"] = "none", ["qwen3.rope.dimension_count"] = 4 }), index, "m"
    )
    helper.raises(function()
      gguf.config({}, index, "m.gguf")
    end, "m.gguf: architecture is nil")
  end)

  it("has its own names of every weight", function()
    local model = random_model({ model_type = "qwen3", head_dim = 4, attention_bias = true })
    local seen = {}
    for _, w in ipairs(model:named_weights()) do
      local name = gguf.name(w.name)
      assert.is_nil(seen[name])
      seen[name] = true
    end
    for _, name in ipairs({
      "token_embd.weight", "output.weight", "output_norm.weight", "blk.0.attn_norm.weight",
      "blk.1.ffn_norm.weight",
      "blk.1.attn_q.weight", "blk.0.attn_k.bias", "blk.1.attn_output.weight",
      "blk.0.attn_q_norm.weight",
      "blk.1.ffn_gate.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight",
    }) do
      assert.is_true(seen[name], name)
    end
  end)

  it("of Llama has the rows of q and k in pairs, which are brought back to halves", function()
    local shape = { heads = 2, kv_heads = 1, head_dim = 4 }
    local mend = gguf.deinterleave(shape)
    local q = Tensor.from_table({ { 0 }, { 1 }, { 2 }, { 3 }, { 4 }, { 5 }, { 6 }, { 7 } }, "f32")
    local k = Tensor.from_table({ { 0 }, { 1 }, { 2 }, { 3 } }, "f32")
    local v = Tensor.from_table({ { 0 }, { 1 }, { 2 }, { 3 } }, "f32")
    mend("model.layers.0.self_attn.q_proj.weight", q)
    mend("model.layers.0.self_attn.k_proj.weight", k)
    mend("model.layers.0.self_attn.v_proj.weight", v)
    helper.close(q, { 0, 2, 1, 3, 4, 6, 5, 7 }, 0)
    helper.close(k, { 0, 2, 1, 3 }, 0)
    helper.close(v, { 0, 1, 2, 3 }, 0)
  end)
end)
