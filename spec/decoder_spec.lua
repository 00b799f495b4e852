local helper = require("spec.helper")
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local loader = require("liger.model")
local pack = require("liger.nn.pack")

-- Norms and biases are random too: at their first values they would hide a fault.
local function new_model(changes, dtype)
  local config = {
    model_type = "qwen3",
    vocab_size = 11,
    hidden_size = 8,
    num_hidden_layers = 2,
    num_attention_heads = 4,
    num_key_value_heads = 2,
    head_dim = 4,
    intermediate_size = 12,
    rms_norm_eps = 1e-5,
  }
  for key, value in pairs(changes) do
    config[key] = value
  end
  local model = loader.from_config(config, { dtype = dtype }):init(5, 0.5)
  autograd.no_grad(function()
    for i, p in ipairs(model.list) do
      if #p.tensor.shape == 1 then
        local noise = helper.normal(60 + i, p.tensor.shape, dtype)
        p.tensor:copy_(p.name:find("bias$") and noise * 0.3 or noise * 0.2 + 1)
      end
    end
  end)
  return model
end

local SHAPES = {
  ["with norms of q and k, grouped heads"] = {},
  ["with tied embeddings"] = { tie_word_embeddings = true },
  ["with biases in attention"] = { attention_bias = true },
  ["with a window in its second layer"] = {
    use_sliding_window = true, sliding_window = 2, max_window_layers = 1,
  },
  ["of Llama with all biases, tied, one key/value head"] = {
    model_type = "llama", attention_bias = true, mlp_bias = true, tie_word_embeddings = true,
    num_key_value_heads = 1,
  },
  ["of Llama with scaled and partial rope"] = {
    model_type = "llama", num_key_value_heads = 4, head_dim = 8, partial_rotary_factor = 0.5,
    rope_scaling = { rope_type = "linear", factor = 2 },
  },
}

-- Three packed sequences, one of a single token; some positions predict nothing.
local function new_batch()
  local batch = pack.sequences({ { 1, 5, 5, 9, 2 }, { 7 }, { 10, 0, 3, 4 } })
  batch.target:data()[1] = -100
  return batch
end

-- Backward of loss(model) -> scalar; every gradient as a copy, in the list's order.
local function gradients_of(model, loss)
  for _, p in ipairs(model.list) do
    p.tensor.grad = nil
  end
  local value = loss(model)
  value:backward()
  local list = {}
  for i, p in ipairs(model.list) do
    list[i] = helper.to(p.tensor.grad, p.tensor.grad.dtype)
  end
  return list, value:item()
end

local function check_all(model, loss)
  local gradients = gradients_of(model, loss)
  for i, p in ipairs(model.list) do
    helper.check_gradient(function()
      return autograd.no_grad(loss, model):item()
    end, p.tensor, gradients[i], 1e-6, p.name)
  end
end

local function policy_loss(model)
  local logp, entropy = model:logprob(new_batch(), { temperature = 0.8 })
  return fn.sum(logp * helper.normal(70, logp.shape, logp.dtype))
    + fn.sum(entropy * helper.normal(71, entropy.shape, entropy.dtype))
end

local function supervised_loss(model)
  return (model:cross_entropy(new_batch(), 1 / 7))
end

describe("the gradients of a decoder", function()
  for name, changes in pairs(SHAPES) do
    it("agree with central differences " .. name, function()
      local model = new_model(changes, "f64")
      check_all(model, policy_loss)
      check_all(model, supervised_loss)
    end)
  end

  it("agree with central differences where logits are recomputed in the backward", function()
    check_all(new_model({ tie_word_embeddings = true }, "f64"), function(model)
      local logp = model:logprob(new_batch(), { logits_budget = 0 })
      return fn.sum(logp * helper.normal(73, logp.shape, "f64"))
    end)
  end)

  it("are the same bits with checkpointing", function()
    for name, changes in pairs(SHAPES) do
      for _, dtype in ipairs({ "f32", "bf16" }) do
        local model = new_model(changes, dtype)
        for _, loss in ipairs({ policy_loss, supervised_loss }) do
          model.checkpointing = false
          local plain, value = gradients_of(model, loss)
          model.checkpointing = true
          local again, same_value = gradients_of(model, loss)
          assert.equal(value, same_value)
          for i, gradient in ipairs(plain) do
            helper.same(again[i], gradient, name .. " " .. model.list[i].name)
          end
        end
      end
    end
  end)
end)

-- ---- batches ----

-- Eight samples of uneven lengths.
local function new_samples()
  local samples = {}
  for i = 1, 8 do
    local ids, completion = {}, {}
    for j = 1, 1 + i % 4 do
      ids[j] = (i * 3 + j) % 11
    end
    for j = 1, 1 + i * 5 % 7 do
      completion[j] = (i + j * j) % 11
    end
    samples[i] = { ids = ids, completion = completion }
  end
  return samples
end

describe("a batch", function()
  -- Gradients and loss of the samples in runs of `size`.
  local function in_runs(model, size, loss)
    local samples, total = new_samples(), 0
    for _, p in ipairs(model.list) do
      p.tensor.grad = nil
    end
    local count = 0
    for _, s in ipairs(samples) do
      count = count + #s.completion
    end
    for first = 1, #samples, size do
      local part = {}
      for i = first, first + size - 1 do
        part[#part + 1] = samples[i]
      end
      local value = loss(model, pack.completions(part), count)
      value:backward()
      total = total + value:item()
    end
    local list = {}
    for i, p in ipairs(model.list) do
      list[i] = helper.to(p.tensor.grad, p.tensor.grad.dtype)
    end
    return list, total
  end

  local LOSSES = {
    cross_entropy = function(model, batch, count)
      return (model:cross_entropy(batch, 1 / count))
    end,
    logprob = function(model, batch, count)
      local logp, entropy = model:logprob(batch)
      return fn.sum(logp + entropy * 0.1) * (-1 / count)
    end,
  }

  for name, loss in pairs(LOSSES) do
    it("has the same loss and gradient in runs of 1, 4 and 8: " .. name, function()
      for _, dtype in ipairs({ "f32", "f64" }) do
        local tolerance = dtype == "f32" and 1e-6 or 1e-12
        local model = new_model({ tie_word_embeddings = true }, dtype)
        local whole, value = in_runs(model, 8, loss)
        for _, size in ipairs({ 1, 4 }) do
          local parts, same_value = in_runs(model, size, loss)
          helper.close(same_value, value, tolerance)
          for i, gradient in ipairs(whole) do
            helper.close(parts[i], gradient, tolerance, model.list[i].name)
          end
        end
      end
    end)
  end

  it("gives each sequence the bits it has alone", function()
    for _, dtype in ipairs({ "f32", "bf16" }) do
      for _, changes in pairs(SHAPES) do
        local model = new_model(changes, dtype)
        local samples = new_samples()
        local packed = pack.completions(samples)
        local logp, entropy = autograd.no_grad(function()
          return model:logprob(packed)
        end)
        local at = 1
        for _, s in ipairs(samples) do
          local one, its_entropy = autograd.no_grad(function()
            return model:logprob(pack.completions({ s }))
          end)
          helper.same(logp:narrow(1, at, #s.completion), one)
          helper.same(entropy:narrow(1, at, #s.completion), its_entropy)
          at = at + #s.completion
        end
        assert.equal(logp.shape[1], at - 1)
      end
    end
  end)

  it("gives the same bits with and without a graph, on any number of threads", function()
    local model = new_model({}, "f32")
    local batch = pack.completions(new_samples())
    local logp = model:logprob(batch)
    helper.with_threads({ 1, 2, 3 }, function()
      helper.same(model:logprob(batch):detach(), logp:detach())
      helper.same(autograd.no_grad(function()
        return (model:logprob(batch))
      end), logp:detach())
    end)
  end)

  it("gives its completions only, in order", function()
    local model = new_model({}, "f32")
    local samples = new_samples()
    local logp = model:logprob(pack.completions(samples)):detach()
    local k = 0
    for _, s in ipairs(samples) do
      local ids = {}
      for _, list in ipairs({ s.ids, s.completion }) do
        for _, id in ipairs(list) do
          ids[#ids + 1] = id
        end
      end
      local z = model:logits(ids):to_table()
      for j = 1, #s.completion do
        local row, sum = z[#s.ids + j - 1], 0
        for _, x in ipairs(row) do
          sum = sum + math.exp(x)
        end
        helper.close(logp:to_table()[k + j], row[s.completion[j] + 1] - math.log(sum), 1e-5)
      end
      k = k + #s.completion
    end
  end)
end)
