local helper = require("spec.helper")
local advantage = require("liger.loss.advantage")
local batch_module = require("liger.rollout.batch")
local grpo = require("liger.loss.grpo")
local loader = require("liger.model")
local memory = require("liger.memory")
local optim = require("liger.optim")
local score = require("liger.rollout.score")
local tokenizer = require("liger.data.tokenizer")

local CONFIG = {
  model_type = "qwen3", vocab_size = 256, hidden_size = 16, num_hidden_layers = 2,
  num_attention_heads = 4,
  num_key_value_heads = 2, head_dim = 8, intermediate_size = 24, max_position_embeddings = 128,
  tie_word_embeddings = true,
}

local bytes = tokenizer.bytes()

local function new_model(dtype)
  return loader.from_config(CONFIG, { dtype = dtype }):init(4, 0.3)
end

local function new_rows(...)
  local rows = {}
  for i, prompt in ipairs({ ... }) do
    rows[i] = { prompt = prompt, ids = bytes:encode(prompt), answer = tostring(i) }
  end
  return rows
end

local function new_batch(model, options, ...)
  local o = { group = 4, max_new = 9, stop = { 7, 30, 61, 99, 200 }, seed = 3 }
  for key, value in pairs(options or {}) do
    o[key] = value
  end
  return batch_module.generate(model, bytes, new_rows(...), o)
end

-- Rewards by turns: the first group's are all equal.
local function give_advantages(batch, rewards)
  batch:set_advantages((advantage.compute(rewards, { group = batch.group })))
end

local REWARDS = { 1, 1, 1, 1, 0, 1, 0, 1, 3, 0, 0, 0 }

-- Backward of all micro-batches; loss, gradients and metrics.
local function learn(model, batch, o, max_tokens, keep_all)
  for _, p in ipairs(model.list) do
    p.tensor.grad = nil
  end
  batch:set_weights(grpo.weights(batch:lengths(), o))
  local function logprob(micro)
    return model:logprob(micro)
  end
  local loss, parts = 0, {}
  local whole = grpo.whole(batch, o, max_tokens, logprob)
  for micro in batch:split(max_tokens, keep_all or grpo.keeps_all(o)) do
    local logp, entropy = logprob(micro)
    local value, part = grpo.loss(micro, logp, entropy, o, whole)
    value:backward()
    loss = loss + value:item()
    parts[#parts + 1] = part
  end
  local gradients = {}
  for i, p in ipairs(model.list) do
    gradients[i] = helper.to(p.tensor.grad, p.tensor.grad.dtype)
  end
  return loss, gradients, grpo.metrics(parts, o), #parts
end

local function same_gradients(model, got, wanted, tolerance)
  for i, p in ipairs(model.list) do
    helper.close(got[i], wanted[i], tolerance or 1e-6, p.name)
  end
end

describe("a batch", function()
  it("holds each completion's text without its stop token", function()
    local batch = new_batch(new_model(), {}, "ab", "cde=", "x")
    assert.equal(12, #batch.samples)
    local tokens, ended = 0, 0
    for i, s in ipairs(batch.samples) do
      assert.equal(math.floor((i - 1) / 4) + 1, tonumber(s.row.answer))
      assert.equal(#s.completion, #s.logp)
      local shown = { unpack(s.completion, 1, #s.completion - (s.stopped and 1 or 0)) }
      assert.equal(bytes:decode(shown), s.text)
      tokens = tokens + #s.ids + #s.completion
      ended = ended + (s.stopped and 1 or 0)
    end
    assert.equal(tokens, batch.num_tokens)
    assert.is_true(ended > 0)
  end)

  it("names its lengths as TRL does", function()
    local batch = setmetatable({ samples = {
      { completion = { 1, 2, 3 }, stopped = true }, { completion = { 1 }, stopped = true },
      { completion = { 1, 2, 3, 4, 5 }, stopped = false },
    } }, getmetatable(new_batch(new_model(), { max_new = 1 }, "a")))
    assert.same({
      ["completions/mean_length"] = 3, ["completions/min_length"] = 1,
      ["completions/max_length"] = 5,
      ["completions/clipped_ratio"] = 1 / 3, ["completions/mean_terminated_length"] = 2,
      ["completions/min_terminated_length"] = 1, ["completions/max_terminated_length"] = 3,
    }, batch:metrics())
    batch.samples = { batch.samples[3] }
    assert.equal(0, batch:metrics()["completions/mean_terminated_length"])
    assert.equal(0, batch:metrics()["completions/min_terminated_length"])
    batch.samples = {}
    for _, value in pairs(batch:metrics()) do
      assert.equal(0, value)
    end
  end)

  it("packs what the loss needs for each completion token", function()
    local samples = {
      {
        ids = { 1, 2 }, completion = { 3, 4 }, logp = { -1, -2 }, ref_logp = { -3, -4 },
        advantage = 0.5, weight = 0.1,
      },
      {
        ids = { 5 }, completion = { 6 }, logp = { -5 }, ref_logp = { -6 }, advantage = -1,
        weight = 0.2, masked = true,
      },
    }
    local p = batch_module.pack(samples)
    helper.close(p.mask, { 1, 1, 0 }, 0)
    helper.close(p.weight, { 0.1, 0.1, 0 }, 1e-7)
    helper.close(p.advantage, { 0.5, 0.5, -1 }, 0)
    helper.close(p.old_logp, { -1, -2, -5 }, 0)
    helper.close(p.ref_logp, { -3, -4, -6 }, 0)
    assert.equal(samples, p.samples)
    samples[1].ref_logp = nil
    assert.is_nil(batch_module.pack(samples).ref_logp)
  end)

  it("has a ratio of exactly 1 with the model that made it", function()
    local model = new_model()
    local batch = new_batch(model, {}, "ab", "cde=", "x")
    give_advantages(batch, REWARDS)
    batch:set_weights(grpo.weights(batch:lengths(), grpo.options()))
    for micro in batch:split(0) do
      local logp = model:logprob(micro)
      local _, parts = grpo.token_loss(micro, logp, grpo.options())
      for _, ratio in ipairs(parts.ratio:to_table()) do
        assert.equal(1, ratio)
      end
    end
  end)
end)

describe("skipping", function()
  it("samples of no advantage gives the gradient of keeping them, and says how many", function()
    for _, kind in ipairs(grpo.ranges.loss_type) do
      local model = new_model()
      local o = grpo.options({ loss_type = kind, max_completion_length = 9 })
      assert.is_false(grpo.keeps_all(o))
      local batch = new_batch(model, {}, "ab", "cde=", "x")
      give_advantages(batch, REWARDS)
      local loss, gradients = learn(model, batch, o, 0)
      assert.equal(4, batch.num_skipped)
      local all_loss, all_gradients = learn(model, batch, o, 0, true)
      assert.equal(0, batch.num_skipped)
      helper.close(loss, all_loss, 1e-6)
      same_gradients(model, gradients, all_gradients)
    end
  end)

  it("is not for losses that give samples of no advantage a gradient", function()
    for _, options in ipairs({
      { beta = 0.1 }, { entropy_coef = 0.1 }, { top_entropy_quantile = 0.5 },
      { loss = function(_, logp) return logp end },
    }) do
      local model, o = new_model(), grpo.options(options)
      local batch = new_batch(model, {}, "ab", "cde=", "x")
      give_advantages(batch, REWARDS)
      batch:set_reference(new_model())
      learn(model, batch, o, 0)
      assert.equal(0, batch.num_skipped)
    end
  end)

  it("leaves a batch without any signal without a micro-batch", function()
    local model = new_model()
    local batch = new_batch(model, {}, "ab", "x")
    give_advantages(batch, { 1, 1, 1, 1, 0, 0, 0, 0 })
    assert.is_nil(batch:split(0)())
    assert.equal(8, batch.num_skipped)
    local optimizer = optim.adamw(model:parameters(), { lr = 0.1 })
    local before = helper.to(model.weights.embed, "f32")
    local norm, updated = optimizer:step()
    assert.equal(0, norm)
    assert.is_true(updated)
    helper.same(helper.to(model.weights.embed, "f32"), before)
  end)

  it("leaves out empty completions", function()
    local batch = new_batch(new_model(), {}, "ab")
    give_advantages(batch, { 1, 0, 0, 0 })
    batch.samples[2].completion, batch.samples[2].logp = {}, {}
    batch:set_weights(grpo.weights(batch:lengths(), grpo.options()))
    assert.equal(3, #batch:split(0)().samples)
    assert.equal(1, batch.num_skipped)
  end)
end)

describe("splitting", function()
  it("changes neither loss nor gradient nor metrics", function()
    for _, level in ipairs({ "token", "sequence" }) do
      local model = new_model()
      local batch = new_batch(model, {}, "ab", "cde=", "x")
      give_advantages(batch, REWARDS)
      for _, s in ipairs(batch.samples) do
        for j = 1, #s.logp do
          s.logp[j] = s.logp[j] - 0.5 * s.advantage * math.sin(j) ^ 2
        end
      end
      local o = grpo.options({ importance_sampling_level = level, epsilon = 0.1 })
      local loss, gradients, metrics, micros = learn(model, batch, o, 0)
      assert.equal(1, micros)
      for _, max_tokens in ipairs({ 1, 25, 60 }) do
        local same_loss, same, same_metrics, more = learn(model, batch, o, max_tokens)
        assert.is_true(more > 1)
        helper.close(same_loss, loss, 1e-6)
        same_gradients(model, same, gradients)
        for name, value in pairs(metrics) do
          helper.close(same_metrics[name], value, 1e-6, name)
        end
      end
      assert.is_true(metrics["clip_ratio/region_mean"] > 0)
    end
  end)
end)

describe("splitting with masks over the whole batch", function()
  local function check(options)
    local model, o = new_model(), grpo.options(options)
    local batch = new_batch(model, {}, "ab", "cde=", "x")
    give_advantages(batch, REWARDS)
    for i, s in ipairs(batch.samples) do
      for j = 1, #s.logp do
        s.logp[j] = s.logp[j] - 0.3 * math.sin(i + j)
      end
    end
    local loss, gradients, metrics, micros = learn(model, batch, o, 0)
    assert.equal(1, micros)
    for _, max_tokens in ipairs({ 1, 60 }) do
      local same_loss, same, same_metrics, more = learn(model, batch, o, max_tokens)
      assert.is_true(more > 1)
      helper.close(same_loss, loss, 1e-6)
      same_gradients(model, same, gradients)
      for name, value in pairs(metrics) do
        helper.close(same_metrics[name], value, 1e-6, name)
      end
    end
    return loss, metrics
  end

  it("changes nothing", function()
    local plain = check({})
    for _, options in ipairs({
      { top_entropy_quantile = 0.3 }, { entropy_coef = 0.1 },
      { top_entropy_quantile = 0.3, entropy_coef = 0.1, loss_type = "cispo" },
      { off_policy_mask_threshold = 0.01 }, { loss_type = "luspo" }, { loss_type = "vespo" },
      { loss_type = "sapo" },
    }) do
      assert.is_false(plain == check(options))
    end
  end)
end)

describe("advantages of tokens", function()
  it("are those of the sample where they are equal, and 0 for the samples to skip", function()
    local model, o = new_model(), grpo.options()
    local batch = new_batch(model, {}, "ab", "cde=")
    local rewards = { 1, 0, 0, 0, 1, 1, 1, 1 }
    give_advantages(batch, rewards)
    local loss, gradients = learn(model, batch, o, 0)
    local lists = {}
    for i, s in ipairs(batch.samples) do
      lists[i] = {}
      for j = 1, #s.completion do
        lists[i][j] = s.advantage
      end
    end
    batch:set_advantages(lists)
    local same_loss, same = learn(model, batch, o, 0)
    assert.equal(4, batch.num_skipped)
    assert.equal(loss, same_loss)
    same_gradients(model, same, gradients, 0)
    lists[1][2] = 5
    assert.is_false(loss == learn(model, batch, o, 0))
  end)
end)

describe("the old policy", function()
  it("is scored beside the sampler", function()
    local model, other = new_model(), loader.from_config(CONFIG):init(9, 0.3)
    local batch = new_batch(model, {}, "ab", "x")
    give_advantages(batch, { 1, 0, 0, 1, 0, 0, 1, 0 })
    batch:set_old(model, {})
    for _, s in ipairs(batch.samples) do
      assert.same(s.logp, s.old_logp) -- bit for bit
      assert.equal(s.logp, s.sampler_logp)
    end
    batch:set_old(other, {})
    local o = grpo.options({ sampler_mode = "token_truncate", sampler_clip_max = 1.5 })
    local metrics = grpo.sampler_ratios(batch.samples, o)
    assert.equal(1.5, metrics["sampling/importance_sampling_ratio/max"])
    batch:set_weights(grpo.weights(batch:lengths(), o))
    local p = batch:split(0)()
    local s = p.samples[1]
    for j = 1, #s.completion do
      helper.close(p.old_logp:to_table()[j], s.old_logp[j], 1e-6)
      helper.close(p.sampler_logp:to_table()[j], s.logp[j], 1e-6)
      local ratio = math.exp(s.old_logp[j] - s.logp[j])
      helper.close(p.sampler_ratio:to_table()[j], math.min(ratio, 1.5), 1e-6)
    end
  end)
end)

describe("masking truncated completions", function()
  it("takes them out of loss, gradient and counts", function()
    local model, o = new_model(), grpo.options({ loss_type = "dapo" })
    local batch = new_batch(model, {}, "ab", "cde=", "x")
    give_advantages(batch, { 1, 0, 2, 0, 0, 1, 0, 1, 3, 0, 0, 0 })
    local whole = learn(model, batch, o, 0, true)
    batch:mask_truncated()
    local cut, kept = 0, {}
    for i, s in ipairs(batch.samples) do
      assert.equal(s.stopped and #s.completion or 0, batch:lengths()[i])
      if s.stopped then
        kept[#kept + 1] = s
      else
        cut = cut + 1
      end
    end
    assert.is_true(cut > 0 and #kept > 0)
    local loss, gradients = learn(model, batch, o, 0, true)
    assert.equal(cut, batch.num_skipped)
    assert.is_false(loss == whole)
    -- The same as a batch that never had them.
    batch.samples = kept
    local wanted, wanted_gradients = learn(model, batch, o, 0, true)
    assert.equal(wanted, loss)
    same_gradients(model, gradients, wanted_gradients, 0)
    for _, s in ipairs(kept) do
      s.stopped = false
    end
    batch:mask_truncated()
    assert.is_nil(batch:split(0, true)())
  end)
end)

describe("a reference", function()
  it("gives each completion token its log-probability", function()
    local model = new_model()
    local other = loader.from_config(CONFIG):init(9, 0.3)
    local batch = new_batch(model, {}, "ab", "cde=")
    batch:set_reference(other, { temperature = 0.8 })
    for _, s in ipairs(batch.samples) do
      local ids = {}
      for _, list in ipairs({ s.ids, s.completion }) do
        for _, id in ipairs(list) do
          ids[#ids + 1] = id
        end
      end
      local scored = score.sequences(other, { ids }, { temperature = 0.8 })[1].logp
      assert.same({ unpack(scored, #s.ids) }, s.ref_logp)
    end
    -- Of the model itself it is what the sampler gave.
    batch = new_batch(model, { temperature = 0.8 }, "ab", "cde=")
    batch:set_reference(model:copy(), { temperature = 0.8 })
    for _, s in ipairs(batch.samples) do
      assert.same(s.logp, s.ref_logp)
    end
  end)
end)

describe("rewards", function()
  it("are called with text, row and sample, and averaged", function()
    local batch = new_batch(new_model(), {}, "ab", "x")
    local calls = 0
    local mean = batch:score(function(text, row, sample)
      calls = calls + 1
      assert.equal(batch.samples[calls].text, text)
      assert.equal(batch.samples[calls].row, row)
      assert.equal(batch.samples[calls], sample)
      return calls
    end)
    assert.equal(4.5, mean)
    assert.same({ { 1 }, { 2 }, { 3 }, { 4 }, { 5 }, { 6 }, { 7 }, { 8 } }, batch:rewards())
  end)

  it("of several functions are weighted and added; nil does not apply", function()
    local batch = new_batch(new_model(), {}, "ab", "x")
    local calls = 0
    local mean, sum, count = batch:score({
      weights = { 1, 0.5 },
      functions = {
        function()
          calls = calls + 1
          if calls <= 2 then
            return calls
          end
        end,
        function()
          if calls ~= 3 then
            return 4
          end
        end,
      },
    })
    assert.same({ 3, 4, nil, 2, 2, 2, 2, 2 }, {
      batch.samples[1].reward, batch.samples[2].reward, nil, batch.samples[4].reward, 2, 2, 2, 2,
    })
    assert.is_nil(batch.samples[3].reward)
    assert.same({ 17, 7 }, { sum, count })
    helper.close(mean, 17 / 7, 1e-12)
    local rows = batch:rewards()
    assert.same({ 1, 4 }, rows[1])
    assert.is_true(rows[3][1] ~= rows[3][1] and rows[3][2] ~= rows[3][2])
    assert.same({ 0 }, { (advantage.compute(rows, { group = 4 }))[3] })
  end)

  it("that apply to no completion are refused", function()
    local batch = new_batch(new_model(), {}, "ab", "x")
    helper.raises(function()
      batch:score(function() end)
    end, "reward: it gave nil for each of 8 completions, wanted a number; the first is ")
  end)

  it("that are no number are refused with the completion", function()
    local batch = new_batch(new_model(), {}, "ab", "x")
    local function refused(value, ...)
      helper.raises(function()
        local calls = 0
        batch:score(function()
          calls = calls + 1
          if calls == 3 then
            return value
          end
          return 0
        end)
      end, ...)
    end
    refused(
      "1", "reward: it gave string for completion 3, wanted a finite number; the completion is "
    )
    refused(true, "reward: it gave boolean for completion 3")
    refused(0 / 0, "reward: it gave NaN for completion 3")
    refused(math.huge, "reward: it gave inf for completion 3, wanted a finite number")
    local message = helper.raises(function()
      batch:score(function()
        error("my own mistake")
      end)
    end, "my own mistake", "batch_spec.lua")
    assert.is_nil(tostring(message):find("\n"))
  end)
end)

describe("a batch that an interrupt cuts", function()
  it("says so, and is no batch of a run's rollouts", function()
    local stops = false
    local function should_stop()
      return stops
    end
    local task = { model = new_model(), tokenizer = bytes, held_out = new_rows("ab", "c", "d") }
    local run = {
      config = { max_completion_length = 3, temperature = 1, seed = 1, cache_bytes = 2 ^ 20 },
      should_stop = should_stop,
      parts = function(_, rows, size)
        assert.is_true(size > 3)
        local given = false
        return function()
          local part = not given and rows or nil
          given = true
          return part
        end
      end,
    }
    local rollouts = require("liger.train.rollouts").new(run, task, function(text)
      return text == "" and 0 or 1
    end)
    local first, mean, sum, number = rollouts:complete(task.held_out, { group = 2 })
    assert.equal(6, #first.samples)
    assert.is_false(first.interrupted)
    assert.same({ mean * 6, 6 }, { sum, number })
    assert.equal(6, rollouts.number)
    assert.is_truthy(rollouts:evaluate():find("^%d%.%d%d sampled, %d%.%d%d greedy$"))
    assert.equal(6 + 6 + 3, rollouts.number)
    stops = true
    assert.is_nil((rollouts:complete(task.held_out)))
    assert.equal("interrupted sampled, interrupted greedy", rollouts:evaluate())
  end)
end)

-- ---- memory ----

local function live()
  collectgarbage()
  collectgarbage()
  return memory.stats().live
end

describe("memory", function()
  it("B103: after 200 steps of GRPO is that after 20", function()
    local model = new_model()
    local reference = model:copy()
    local optimizer = optim.adamw(model:parameters(), { lr = 1e-3 })
    local o = grpo.options({ beta = 0.01 })
    local rows = new_rows("ab", "cde=")
    local at_20, peak, logged
    for step = 1, 200 do
      memory.reset_peak()
      local scope = memory.open_scope()
      local batch = batch_module.generate(model, bytes, rows, {
        group = 4, max_new = 4 + step % 3, seed = 1, first_sequence = step * 8, stop = { 7, 61 },
      })
      local mean = batch:score(function(text)
        return #text
      end)
      give_advantages(batch, batch:rewards())
      batch:set_reference(reference)
      local loss, _, metrics = learn(model, batch, o, 0, true)
      local norm = optimizer:step()
      memory.close_scope(scope)
      logged = {
        loss = loss, reward = mean, grad_norm = norm, kl = metrics.kl, entropy = metrics.entropy,
      }
      if step == 20 then
        at_20, peak = live(), memory.stats().peak
      elseif step > 20 then
        assert.is_true(memory.stats().peak < 2 * peak)
      end
    end
    -- Other specs' remains may go in between, nothing may come.
    assert.is_true(live() <= at_20)
    for name, value in pairs(logged) do
      assert.equal("number", type(value), name)
    end
  end)

  it("of 1,000 steps of a training loop is flat", function()
    local pack = require("liger.nn.pack")
    local model = loader.from_config({
      model_type = "llama", vocab_size = 16, hidden_size = 8, num_hidden_layers = 1,
      num_attention_heads = 2,
      intermediate_size = 8,
    }):init(1, 0.3)
    local optimizer = optim.adamw(model:parameters(), { lr = 1e-3 })
    local samples = {
      { ids = { 1, 2 }, completion = { 3, 4, 5 } }, { ids = { 6 }, completion = { 7, 8 } },
    }
    local at_10, peak
    for step = 1, 1000 do
      if step == 10 or step == 1000 then
        live()
        memory.reset_peak()
      end
      local scope = memory.open_scope()
      local loss = model:cross_entropy(pack.completions(samples), 1 / 5)
      loss:backward()
      optimizer:step()
      memory.close_scope(scope)
      if step == 10 then
        peak, at_10 = memory.stats().peak, live()
      end
    end
    assert.is_true(memory.stats().peak <= peak)
    assert.is_true(live() <= at_10)
  end)
end)
