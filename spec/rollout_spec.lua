local helper = require("spec.helper")
local autograd = require("liger.autograd")
local cache_module = require("liger.rollout.cache")
local lib = require("liger.ffi")
local loader = require("liger.model")
local memory = require("liger.memory")
local rollout = require("liger.rollout")
local score = require("liger.rollout.score")

local VOCAB = 23

local function new_model(changes, dtype)
  local config = {
    model_type = "qwen3", vocab_size = VOCAB, hidden_size = 16, num_hidden_layers = 2,
    num_attention_heads = 4,
    num_key_value_heads = 2, head_dim = 8, intermediate_size = 24, max_position_embeddings = 256,
    tie_word_embeddings = true,
  }
  for key, value in pairs(changes or {}) do
    config[key] = value
  end
  return loader.from_config(config, { dtype = dtype }):init(11, 0.5)
end

-- Prompts of 1 to 40 tokens: shorter and longer than a page of 16, and whole pages.
local LENGTHS = { 16, 1, 5, 32, 17, 15, 31, 33, 2, 40 }

local function new_prompts(count)
  local prompts = {}
  for i = 1, count do
    local prompt = {}
    for j = 1, LENGTHS[(i - 1) % #LENGTHS + 1] do
      prompt[j] = (i * 7 + j * j * 3 + j) % VOCAB
    end
    prompts[i] = prompt
  end
  return prompts
end

local function joined(prompt, completion)
  local ids = {}
  for _, list in ipairs({ prompt, completion }) do
    for _, id in ipairs(list) do
      ids[#ids + 1] = id
    end
  end
  return ids
end

-- Fails unless the log-probabilities of the results are those of a forward over the whole
-- sequences, bit for bit.
local function same_as_scored(model, prompts, results, temperature)
  local sequences = {}
  for i, result in ipairs(results) do
    sequences[i] = joined(prompts[result.prompt], result.ids)
  end
  local compared = 0
  for i, scored in ipairs(score.sequences(model, sequences, { temperature = temperature })) do
    local result, skip = results[i], #prompts[results[i].prompt] - 1
    for j = 1, #result.ids do
      compared = compared + 1
      if result.logp[j] ~= scored.logp[skip + j] then
        assert(
          false,
          ("completion %d, token %d: log-probability %.9g, a forward gives %.9g"):format(
            i, j, result.logp[j], scored.logp[skip + j]
          )
        )
      end
    end
  end
  return compared
end

local function generate(model, prompts, options)
  return rollout.generate(model, prompts, options)
end

describe("the log-probabilities of generated tokens", function()
  for _, count in ipairs({ 1, 3, 32, 100 }) do
    it(("are those of a training forward, bit for bit: %d prompts"):format(count), function()
      local model, prompts = new_model(), new_prompts(count)
      for _, group in ipairs(count == 100 and { 1 } or { 1, 4, 8 }) do
        local results = generate(model, prompts, {
          group = group, max_new = count == 32 and 12 or 20, seed = count,
        })
        assert.equal(count * group, #results)
        assert.is_true(same_as_scored(model, prompts, results, 1) > 0)
      end
    end)
  end

  it("are so at any temperature, and with other filters", function()
    local model, prompts = new_model(), new_prompts(6)
    for _, o in ipairs({
      { temperature = 0.3 }, { temperature = 2.5 }, { top_k = 3 }, { top_p = 0.8 },
      { min_p = 0.1, temperature = 0.7 },
    }) do
      o.max_new, o.group = 20, 2
      same_as_scored(model, prompts, generate(model, prompts, o), o.temperature or 1)
    end
    same_as_scored(model, prompts, generate(model, prompts, {
      greedy = true, temperature = 0.5,
    }), 1)
    same_as_scored(model, prompts, generate(model, prompts, { temperature = 0, max_new = 5 }), 1)
  end)

  it("are so for other shapes and dtypes", function()
    for _, case in ipairs({
      { {}, "bf16" },
      { {}, lib.on_cpu and "f64" or "f32" }, -- no device computes in f64
      { {
        model_type = "llama", tie_word_embeddings = false, attention_bias = true, mlp_bias = true,
      } },
      { {
        model_type = "llama", num_key_value_heads = 4,
        rope_scaling = { type = "linear", factor = 2 },
      } },
      {
        { num_attention_heads = 8, num_key_value_heads = 1, head_dim = 16, num_hidden_layers = 3 },
      },
      -- Windows that the prompts are longer than, in the last layer too.
      { { use_sliding_window = true, sliding_window = 5, max_window_layers = 1 } },
      { { use_sliding_window = true, sliding_window = 3, layer_types = {
        "sliding_attention", "full_attention",
      } }, "bf16" },
    }) do
      local model, prompts = new_model(case[1], case[2]), new_prompts(5)
      same_as_scored(model, prompts, generate(model, prompts, { max_new = 20, group = 3 }), 1)
    end
  end)

  it("are so in the forward that training runs", function()
    local model, prompts = new_model(), new_prompts(4)
    local samples = {}
    for i, result in ipairs(generate(model, prompts, { max_new = 18, temperature = 0.9 })) do
      samples[i] = { ids = prompts[i], completion = result.ids, logp = result.logp }
    end
    local batch = require("liger.nn.pack").completions(samples)
    local logp = model:logprob(batch, { temperature = 0.9 }):to_table()
    local k = 0
    for _, s in ipairs(samples) do
      for _, value in ipairs(s.logp) do
        k = k + 1
        assert.equal(value, logp[k])
      end
    end
    assert.equal(#logp, k)
  end)

  it("B45: count positions from each prompt's own start; nothing is padded", function()
    local model = new_model()
    local short, long = { 4, 9, 2 }, new_prompts(10)[10]
    local alone = generate(model, { short }, { max_new = 2 })[1]
    local beside = generate(model, { short, long }, { max_new = 2 })[1]
    assert.same(alone.ids, beside.ids)
    assert.same(alone.logp, beside.logp)
    local z = model:logits(joined(short, alone.ids)):to_table()
    for j = 1, 2 do
      local row, sum = z[#short + j - 1], 0
      for _, x in ipairs(row) do
        sum = sum + math.exp(x)
      end
      helper.close(alone.logp[j], row[alone.ids[j] + 1] - math.log(sum), 1e-5)
    end
  end)
end)

describe("a sequence", function()
  local model, prompts = new_model(), new_prompts(12)
  local OPTIONS = { group = 2, max_new = 25, seed = 5, stop = { 3 } }

  local function with(changes)
    local o = {}
    for _, from in ipairs({ OPTIONS, changes or {} }) do
      for key, value in pairs(from) do
        o[key] = value
      end
    end
    return o
  end

  it("is the same whoever shares its batch", function()
    local all = generate(model, prompts, with())
    for i, prompt in ipairs(prompts) do
      local two = generate(model, { prompt }, with({ first_sequence = (i - 1) * 2 }))
      assert.same({ all[i * 2 - 1].ids, all[i * 2].ids }, { two[1].ids, two[2].ids })
      assert.same({ all[i * 2 - 1].logp, all[i * 2].logp }, { two[1].logp, two[2].logp })
    end
    local one = generate(model, { prompts[7] }, with({ group = 1, first_sequence = 13 }))
    assert.same(all[14].ids, one[1].ids)
  end)

  it("is the same in a small cache, where prompts wait", function()
    local all = generate(model, prompts, with())
    local bytes = cache_module.page_bytes(model.shape, model.dtype)
    -- The longest group takes 2 full pages and 2 * 3 of its own.
    for _, pages in ipairs({ 8, 9, 20 }) do
      assert.same(all, generate(model, prompts, with({ cache_bytes = pages * bytes })))
    end
  end)

  it("is the same on any number of threads", function()
    local all = generate(model, prompts, with())
    helper.with_threads({ 1, 2, 3 }, function()
      assert.same(all, generate(model, prompts, with()))
    end)
  end)

  it("depends on the seed and on its number", function()
    local all = generate(model, prompts, with({ group = 1 }))
    local other = generate(model, { prompts[1] }, with({ seed = 6, group = 1 }))
    assert.are_not.same(all[1].ids, other[1].ids)
    local group = generate(model, { prompts[1] }, with({ group = 4, stop = {} }))
    for a = 1, 4 do
      for b = a + 1, 4 do
        assert.are_not.same(group[a].ids, group[b].ids)
      end
    end
  end)

  it("B82: draws the same from ties in batches of 1 and 8, in bf16", function()
    local tied = new_model({}, "bf16")
    autograd.no_grad(function()
      for _, p in ipairs(tied.list) do
        p.tensor:fill_(#p.tensor.shape == 1 and 1 or 0)
      end
    end)
    -- All logits are 0: of equals the lowest ids stay.
    local batch = {}
    for i = 1, 8 do
      batch[i] = { i }
    end
    local eight = generate(tied, batch, { max_new = 12, top_k = 2 })
    local seen = {}
    for i = 1, 8 do
      local one = generate(tied, { { i } }, { max_new = 12, top_k = 2, first_sequence = i - 1 })
      assert.same(eight[i].ids, one[1].ids)
      for _, id in ipairs(eight[i].ids) do
        seen[id] = true
      end
    end
    assert.same({ [0] = true, [1] = true }, seen)
    for _, id in ipairs(generate(tied, { { 5 } }, { max_new = 5, top_k = 1 })[1].ids) do
      assert.equal(0, id)
    end
  end)
end)

describe("the options of generation", function()
  local model, prompts = new_model(), new_prompts(6)

  it("stop at the given ids, the model's own by default, and keep them", function()
    local free = generate(model, prompts, { max_new = 30, stop = {} })
    for _, result in ipairs(free) do
      assert.equal(30, #result.ids)
      assert.is_false(result.stopped)
    end
    local stop = { free[1].ids[4], free[3].ids[9] }
    local is_stop = { [stop[1]] = true, [stop[2]] = true }
    local function check(results)
      for i, result in ipairs(results) do
        local wanted = 30
        for j = 30, 1, -1 do
          wanted = is_stop[free[i].ids[j]] and j or wanted
        end
        assert.equal(wanted, #result.ids)
        assert.same({ unpack(free[i].ids, 1, wanted) }, result.ids)
        assert.equal(is_stop[free[i].ids[wanted]] or false, result.stopped)
      end
    end
    check(generate(model, prompts, { max_new = 30, stop = stop }))
    local own = new_model()
    own.stop_ids = stop
    check(generate(own, prompts, { max_new = 30 }))
  end)

  it("take as many tokens as max_new, none at 0", function()
    for _, max_new in ipairs({ 1, 2, 16, 17 }) do
      for _, result in ipairs(generate(model, prompts, { max_new = max_new })) do
        assert.equal(max_new, #result.ids)
        assert.equal(max_new, #result.logp)
      end
    end
    for _, result in ipairs(generate(model, prompts, { max_new = 0 })) do
      assert.same({}, result.ids)
    end
    assert.same({}, generate(model, {}, {}))
  end)

  it("of no length draw what longer ones begin with", function()
    local short = generate(model, prompts, { max_new = 3 })
    local long = generate(model, prompts, { max_new = 20 })
    for i = 1, #prompts do
      assert.same({ unpack(long[i].ids, 1, 3) }, short[i].ids)
    end
  end)

  it("B81: greedy and temperature 0 take the largest logit, whatever the filters", function()
    local greedy = generate(model, prompts, { max_new = 12, greedy = true })
    for i, result in ipairs(greedy) do
      local z = model:logits(joined(prompts[i], result.ids))
      for j, id in ipairs(result.ids) do
        local _, best = z[#prompts[i] + j - 1]:topk(1)
        assert.equal(best[1], id)
      end
    end
    local same = generate(model, prompts, { max_new = 12, temperature = 0, top_k = 2, top_p = 0.9 })
    assert.same(greedy, same)
    -- Nearly 0 is a hard softmax and stays finite.
    local cold = generate(model, prompts, { max_new = 12, temperature = 1e-6 })
    for i, result in ipairs(cold) do
      assert.same(greedy[i].ids, result.ids)
      for _, logp in ipairs(result.logp) do
        assert.is_true(logp <= 0 and logp > -1e-3)
      end
    end
  end)

  it("B78: top_p keeps one token at least; 1 drops none", function()
    local greedy = generate(model, prompts, { max_new = 8, greedy = true })
    for _, top_p in ipairs({ 0, 1e-9 }) do
      for i, result in ipairs(generate(model, prompts, { max_new = 8, top_p = top_p })) do
        assert.same(greedy[i].ids, result.ids)
      end
    end
    local plain = generate(model, prompts, { max_new = 8 })
    assert.same(plain, generate(model, prompts, { max_new = 8, top_p = 1 }))
    assert.are_not.same(plain, generate(model, prompts, { max_new = 8, top_p = 0.3 }))
  end)

  it("B80: top_k of 0, -1 and more than there are is off", function()
    local plain = generate(model, prompts, { max_new = 8 })
    for _, top_k in ipairs({ 0, -1, VOCAB, 1000 }) do
      assert.same(plain, generate(model, prompts, { max_new = 8, top_k = top_k }))
    end
    assert.are_not.same(plain, generate(model, prompts, { max_new = 8, top_k = 2 }))
  end)

  it("min_p keeps what is likely enough beside the likeliest", function()
    local greedy = generate(model, prompts, { max_new = 8, greedy = true })
    for i, result in ipairs(generate(model, prompts, { max_new = 8, min_p = 1 })) do
      assert.same(greedy[i].ids, result.ids)
    end
  end)

  it("hand out tokens as they come and end when interrupted", function()
    local seen = {}
    local results = generate(model, prompts, {
      max_new = 6,
      on_token = function(completion, id, logp)
        seen[completion] = seen[completion] or { ids = {}, logp = {} }
        table.insert(seen[completion].ids, id)
        table.insert(seen[completion].logp, logp)
      end,
    })
    for i, result in ipairs(results) do
      assert.same(result.ids, seen[i].ids)
      assert.same(result.logp, seen[i].logp)
    end
    local calls = 0
    local cut = generate(model, prompts, {
      max_new = 50,
      interrupted = function()
        calls = calls + 1
        return calls == 3
      end,
    })
    assert.equal(3, calls)
    assert.is_true(#cut[1].ids > 0 and #cut[1].ids < 50)
    assert.is_false(cut[1].stopped)
  end)

  it("are refused when unknown or out of range", function()
    local function refused(options, ...)
      helper.raises(function()
        generate(model, prompts, options)
      end, ...)
    end
    refused({ max_tokens = 3 }, "generate: unknown option max_tokens")
    refused({ group = 0 }, "generate: group is 0, wanted a whole number from 1")
    refused({ group = 1.5 }, "generate: group is 1.5")
    refused({ max_new = -1 }, "generate: max_new is -1, wanted a whole number from 0")
    refused({ max_new = "5" }, "generate: max_new is 5, wanted a whole number")
    refused({ temperature = -1 }, "generate: temperature is -1, wanted a number from 0")
    refused({ temperature = 0 / 0 }, "generate: temperature is")
    refused({ top_k = -2 }, "generate: top_k is -2, wanted a whole number from -1")
    refused({ top_k = 1.5 }, "generate: top_k is 1.5")
    refused({ top_p = 1.1 }, "generate: top_p is 1.1, wanted a number from 0 to 1")
    refused({ min_p = -0.1 }, "generate: min_p is -0.1, wanted a number from 0 to 1")
    refused({ seed = 0.5 }, "generate: seed is 0.5, wanted a whole number")
    refused({ first_sequence = -1 }, "generate: first_sequence is -1, wanted a whole number from 0")
    refused({ cache_bytes = "1" }, "generate: cache_bytes is 1, wanted a number from 0")
    refused({ stop = 3 }, "generate: stop is 3, wanted a list of ids")
    refused({ stop = { 1.5 } }, "generate: stop has 1.5, wanted whole numbers")
    helper.raises(function()
      generate(model, { "text" }, {})
    end, "generate: prompt 1 is a string, wanted a list of ids")
    helper.raises(function()
      generate(model, { { 1, 1.5 } }, {})
    end, "generate: prompt 1 has 1.5, wanted whole numbers")
    refused({
      cache_bytes = 1000,
    }, "generate: a prompt needs 10 cache pages and cache_bytes = 1000 gives 0")
  end)

  it("are refused with prompts that cannot be", function()
    helper.raises(function()
      generate(model, { { 1 }, {} }, {})
    end, "generate: prompt 2 is empty, wanted at least one token")
    helper.raises(function()
      generate(model, { { 1, 2, 3 } }, { max_new = 254 })
    end, "generate: prompt 1 has 3 tokens and max_new is 254, wanted at most 256 together")
    assert.equal(253, #generate(model, { { 1, 2, 3 } }, { max_new = 253 })[1].ids)
    helper.raises(function()
      generate(model, { { 1, VOCAB } }, {})
    end, "embedding:")
  end)

  it("B83: NaN in the weights is an error, not token 0", function()
    local broken = new_model()
    broken.weights.norm:fill_(0 / 0)
    helper.raises(function()
      generate(broken, prompts, {})
    end, "sample:")
    memory.reset()
  end)
end)

describe("the cache", function()
  it("hands pages out, counts who shares them, and takes them back", function()
    local cache = cache_module.new(new_model().shape, "f32", 3)
    assert.same({ 0, 1, 2 }, { cache:take(), cache:take(), cache:take() })
    helper.raises(function()
      cache:take()
    end, "cache: no page is free")
    cache:share(1)
    cache:drop(1)
    assert.equal(0, #cache.free)
    cache:drop(1)
    assert.same({ 1 }, cache.free)
    assert.equal(1, cache:take())
  end)

  it("has its pages back after a generation, however it went", function()
    local model, prompts = new_model(), new_prompts(9)
    local new, made = cache_module.new, nil
    cache_module.new = function(...)
      made = new(...)
      made.all = #made.free
      return made
    end
    local bytes = cache_module.page_bytes(model.shape, model.dtype)
    for _, o in ipairs({
      { max_new = 20 }, { max_new = 1, group = 8 }, { max_new = 17, group = 3, stop = { 2, 5 } },
      { max_new = 30, group = 2, stop = { 1 }, cache_bytes = 9 * bytes },
    }) do
      local ok, message = pcall(generate, model, prompts, o)
      if not ok then
        cache_module.new = new
        error(message)
      end
      assert.equal(made.all, #made.free)
      for _, uses in pairs(made.uses) do
        assert.equal(0, uses)
      end
    end
    cache_module.new = new
  end)

  it("leaves no memory behind over 50 generations", function()
    local model, prompts = new_model(), new_prompts(5)
    local function live()
      collectgarbage()
      collectgarbage()
      return memory.stats().live
    end
    local before, peak
    for i = 1, 50 do
      memory.reset_peak()
      local scope = memory.open_scope()
      generate(model, prompts, { max_new = 10, group = 2, seed = i })
      memory.close_scope(scope)
      before, peak = before or live(), peak or memory.stats().peak
      assert.is_true(live() <= before)
      -- What the collector has not come to yet may be live too.
      assert.is_true(memory.stats().peak < 2 * peak)
    end
  end)
end)

describe("scoring", function()
  it("gives one log-probability and entropy a token after the first, in batches of many", function()
    local model = new_model()
    local sequences = {}
    for i = 1, 150 do
      sequences[i] = new_prompts(i)[i]
    end
    sequences[151] = {}
    sequences[152] = { 3 }
    local scored = score.sequences(model, sequences)
    for i, ids in ipairs(sequences) do
      assert.equal(math.max(#ids - 1, 0), #scored[i].logp)
      assert.equal(math.max(#ids - 1, 0), #scored[i].entropy)
    end
    for _, i in ipairs({ 1, 77, 150 }) do
      assert.same(score.sequences(model, { sequences[i] })[1], scored[i])
    end
    assert.same({}, score.sequences(model, {}))
    assert.is_nil(model.list[1].tensor.grad)
  end)
end)
