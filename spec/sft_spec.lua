local helper = require("spec.helper")
local loader = require("liger.model")
local pack = require("liger.nn.pack")
local sft = require("liger.loss.sft")

local CONFIG = {
  model_type = "qwen3", vocab_size = 13, hidden_size = 8, num_hidden_layers = 1,
  num_attention_heads = 2, head_dim = 4,
  intermediate_size = 12, tie_word_embeddings = true,
}

local function tensor_of(list, dtype)
  return require("liger.tensor").from_table(list, dtype or "f32")
end

describe("the sums of supervised rows", function()
  it("are over the targets only", function()
    local batch = { target = tensor_of({ 3, -100, 4, 5 }, "i32"), num_tokens = 4 }
    local rows = {
      loss = tensor_of({ 1, 0 / 0, 5, 3 }), entropy = tensor_of({ 0.5, 0 / 0, 1, 0.25 }),
      predicted = tensor_of({ 3, -1, 9, 5 }, "i32"),
    }
    local sums = sft.sums(batch, rows)
    local total = { loss = 9, entropy = 1.75, correct = 2, tokens = 3 }
    assert.same(total, sft.total({ sums }))
    for name, value in pairs(total) do
      total[name] = 2 * value
    end
    assert.same(total, sft.total({ sums, sums }))
  end)

  it("of a batch without targets are 0", function()
    local batch = { target = tensor_of({ -100 }, "i32"), num_tokens = 1 }
    local rows = {
      loss = tensor_of({ 0 }), entropy = tensor_of({ 0 }), predicted = tensor_of({ -1 }, "i32"),
    }
    assert.same({ loss = 0, entropy = 0, correct = 0, tokens = 0 },
      sft.total({ sft.sums(batch, rows) }))
  end)
end)

describe("supervised fine-tuning", function()
  it("B20: divides by the targets of all micro-batches", function()
    -- Mean of three rows of loss 1 and one of loss 5.
    local first = { target = tensor_of({ 1, 1, 1 }, "i32"), num_tokens = 3 }
    local second = { target = tensor_of({ 1 }, "i32"), num_tokens = 1 }
    local function rows(...)
      local zeros = {}
      for i = 1, select("#", ...) do
        zeros[i] = 0
      end
      return {
        loss = tensor_of({ ... }), entropy = tensor_of(zeros), predicted = tensor_of(zeros, "i32"),
      }
    end
    local total = sft.total({ sft.sums(first, rows(1, 1, 1)), sft.sums(second, rows(5)) })
    assert.equal(2, total.loss / total.tokens)

    local samples = {
      { ids = { 1 }, completion = { 2, 3, 4 } }, { ids = { 5, 6 }, completion = { 7 } },
    }
    local function gradients(parts)
      local model = loader.from_config(CONFIG, { dtype = "f64" }):init(2, 0.4)
      local loss = 0
      for _, part in ipairs(parts) do
        local value = model:cross_entropy(pack.completions(part), 1 / 4)
        value:backward()
        loss = loss + value:item()
      end
      return model, loss
    end
    local whole, loss = gradients({ samples })
    local parts, same_loss = gradients({ { samples[1] }, { samples[2] } })
    helper.close(same_loss, loss, 1e-12)
    for i, p in ipairs(whole.list) do
      helper.close(parts.list[i].tensor.grad, p.tensor.grad, 1e-12, p.name)
    end
  end)

  it("counts what the model predicts", function()
    local model = loader.from_config(CONFIG, { dtype = "f64" }):init(2, 0.4)
    local batch = pack.sequences({ { 1, 2, 3, 4, 5, 6 }, { 7, 8 } })
    local _, rows = model:cross_entropy(batch, 1)
    local sums = sft.total({ sft.sums(batch, rows) })
    local z, correct, loss, entropy = model:logits(batch):to_table(), 0, 0, 0
    for i, target in ipairs(batch.target:to_table()) do
      if target >= 0 then
        local best, total, weighted = 1, 0, 0
        for v, x in ipairs(z[i]) do
          best = x > z[i][best] and v or best
          total, weighted = total + math.exp(x), weighted + x * math.exp(x)
        end
        correct = correct + (best - 1 == target and 1 or 0)
        loss = loss + math.log(total) - z[i][target + 1]
        entropy = entropy + math.log(total) - weighted / total
      end
    end
    assert.equal(6, sums.tokens)
    assert.equal(correct, sums.correct)
    helper.close(sums.loss, loss, 1e-6)
    helper.close(sums.entropy, entropy, 1e-6)
  end)
end)
