-- A real checkpoint against recorded numbers: LIGER_SMOLLM2 names the GGUF file of
-- SmolLM2-135M-Instruct (Q4_1) that they were made with. Without it these specs are left out.
local helper = require("spec.helper")
local cjson = require("cjson")
local fn = require("liger.fn")
local loader = require("liger.model")
local rollout = require("liger.rollout")
local score = require("liger.rollout.score")

local PATH = os.getenv("LIGER_SMOLLM2")

if not PATH or PATH == "" then
  print("\nsmollm2_spec: LIGER_SMOLLM2 names no file; SmolLM2's recorded numbers are not compared")
  return
end

describe("SmolLM2-135M-Instruct", function()
  local golden = cjson.decode(helper.read("spec/fixtures/smollm2/golden.json"))
  local model, tokenizer

  setup(function()
    model, tokenizer = loader.load(PATH)
  end)

  teardown(function()
    model = nil
    collectgarbage()
  end)

  it("encodes texts to the recorded ids, and back", function()
    for _, case in ipairs(golden.encodings) do
      local ids = tokenizer:encode(case.text)
      assert.same(case.ids, ids, case.text)
      assert.equal(case.text, tokenizer:decode(ids))
    end
  end)

  it("renders and encodes chats", function()
    for _, case in ipairs(golden.prompts) do
      local text = case.source
      if type(text) == "table" then
        text = tokenizer:apply_chat_template(case.source, { add_generation_prompt = true })
      end
      assert.equal(case.text, text)
      assert.same(case.ids, tokenizer:encode(text))
    end
  end)

  it("has the recorded logits at every position", function()
    for _, case in ipairs(golden.prompts) do
      local z = model:logits(case.ids)
      for position = 1, #case.ids do
        local row, got, wanted = z[position], {}, case.top_logits[position]
        local values = row:to_table()
        for i, id in ipairs(case.top_ids[position]) do
          got[i] = values[id + 1]
          assert.is_true(math.abs(got[i] - wanted[i]) < 1e-3)
        end
        local _, best = row:topk(1)
        -- Two that are closer than the numbers are exact may change places.
        if wanted[1] - wanted[2] > 2e-3 then
          assert.equal(case.top_ids[position][1], best[1])
        end
      end
    end
  end)

  it("has the recorded log-probabilities and entropies", function()
    local sequences = {}
    for i, case in ipairs(golden.prompts) do
      sequences[i] = case.ids
    end
    for i, scored in ipairs(score.sequences(model, sequences)) do
      local case = golden.prompts[i]
      assert.equal(#case.next_logp, #scored.logp)
      for j, wanted in ipairs(case.next_logp) do
        assert.is_true(
          math.abs(scored.logp[j] - wanted) < 1e-3, ("%g %g"):format(scored.logp[j], wanted)
        )
        assert.is_true(math.abs(scored.entropy[j] - case.entropy[j]) < 1e-3)
      end
      local hidden = model:hidden(require("liger.nn.pack").sequences({ case.ids }))
      -- Any target will do: the log-sum-exp does not depend on it.
      local target = require("liger.tensor").from_table(case.ids, "i32")
      local _, entropy, lse = fn.linear_logprob(
        hidden:detach(), model.weights.head:detach(), target
      )
      local sums, entropies = lse:to_table(), entropy:to_table()
      for j, wanted in ipairs(case.logsumexp) do
        assert.is_true(math.abs(sums[j] - wanted) < 1e-3, ("%g %g"):format(sums[j], wanted))
        assert.is_true(math.abs(entropies[j] - case.entropy[j]) < 1e-3)
      end
    end
  end)

  it("writes the recorded greedy texts", function()
    local prompts = {}
    for i, case in ipairs(golden.prompts) do
      prompts[i] = case.ids
    end
    local results = rollout.generate(model, prompts, { greedy = true, max_new = 24, stop = {} })
    for i, case in ipairs(golden.prompts) do
      local ids = { unpack(results[i].ids, 1, #case.greedy_ids) }
      assert.same(case.greedy_ids, ids)
      assert.equal(case.greedy_text, tokenizer:decode(ids))
    end
  end)

  it("generates with the log-probabilities of its own forward, bit for bit", function()
    local prompts, sequences = {}, {}
    for i = 1, 3 do
      prompts[i] = golden.prompts[i].ids
    end
    local results = rollout.generate(model, prompts, {
      group = 2, max_new = 6, temperature = 0.9, seed = 1,
    })
    for i, result in ipairs(results) do
      sequences[i] = {}
      for _, list in ipairs({ prompts[result.prompt], result.ids }) do
        for _, id in ipairs(list) do
          table.insert(sequences[i], id)
        end
      end
    end
    for i, scored in ipairs(score.sequences(model, sequences, { temperature = 0.9 })) do
      for j, logp in ipairs(results[i].logp) do
        assert.equal(scored.logp[#prompts[results[i].prompt] - 1 + j], logp)
      end
    end
  end)
end)
