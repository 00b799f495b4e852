-- The preference methods' data: rows of files, batches of them, the reference.
local helper = require("spec.helper")
local data = require("liger.data.preference")
local decoder = require("liger.model")
local dpo = require("liger.loss.dpo")
local fn = require("liger.fn")
local memory = require("liger.memory")
local orpo = require("liger.loss.orpo")
local preference = require("liger.train.preference")
local rollouts = require("liger.train.rollouts")
local sums = require("liger.data.sums")
local tokenizer = require("liger.data.tokenizer")

-- A file of the lines, for as long as `each` runs.
local function with_rows(lines, each)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write(table.concat(lines, "\n"), "\n")
  file:close()
  local ok, message = pcall(each, path)
  os.remove(path)
  if not ok then
    error(message, 0)
  end
end

local TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
  .. "{% if add_generation_prompt %}<assistant>{% endif %}"

-- Bytes with a chat template; byte 0 ends a text.
local function new_tokenizer()
  local bytes = tokenizer.bytes()
  bytes.chat_template, bytes.eos_id = TEMPLATE, 0
  return bytes
end

local function text_of(ids)
  local y = {}
  for i, id in ipairs(ids) do
    y[i] = string.char(id)
  end
  return table.concat(y)
end

-- Rows as { prompt, chosen, rejected } or { prompt, completion, label }.
local function read(lines, form, limits)
  local list = {}
  with_rows(lines, function(path)
    for i, row in ipairs(data[form](path, new_tokenizer(), limits or {})) do
      list[i] = row.chosen and { text_of(row.ids), text_of(row.chosen), text_of(row.rejected) }
        or { text_of(row.ids), text_of(row.completion), row.label }
    end
  end)
  return list
end

describe("pairs of a file", function()
  it("are texts or chats behind a prompt", function()
    assert.same({
      { "2+2=", "4\0", "5\0" },
      { "<user>hi|<assistant>", "yo|", "no|" },
    }, read({
      '{"prompt": "2+2=", "chosen": "4", "rejected": "5", "source": "x"}',
      '{"prompt": [{"role": "user", "content": "hi"}],'
        .. ' "chosen": [{"role": "assistant", "content": "yo"}],'
        .. ' "rejected": [{"role": "assistant", "content": "no"}]}',
    }, "pairs"))
  end)

  it("without a prompt, or with chats and one in text, have their common beginning", function()
    assert.same({
      { "<user>hey|<assistant>", "yo|", "no|" },
      { "The sky is", " blue\0", " green\0" },
      { "na", "\195\175ve\0", "\195\174f\0" },
      { "<user>hi|<assistant>", "yo|", "no|" },
    }, read({
      '{"prompt": "hey", "chosen": [{"role": "user", "content": "hey"},'
        .. ' {"role": "assistant", "content": "yo"}], "rejected": [{"role": "user",'
        .. ' "content": "hey"}, {"role": "assistant", "content": "no"}]}',
      '{"chosen": "The sky is blue", "rejected": "The sky is green"}',
      '{"chosen": "na\195\175ve", "rejected": "na\195\174f"}',
      '{"chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],'
        .. ' "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant",'
        .. ' "content": "no"}]}',
    }, "pairs"))
  end)

  it("are cut on the right at max_length, and left out where nothing is left", function()
    local lines = {
      '{"prompt": "12345", "chosen": "abc", "rejected": "d"}',
      '{"prompt": "1234567", "chosen": "abc", "rejected": "d"}',
    }
    assert.same({ { "12345", "ab", "d\0" } }, read(lines, "pairs", { max_length = 7 }))
    assert.equal(2, #read(lines, "pairs", { max_length = false, context = 11 }))
  end)

  it("that are wrong are named by file and line, with what was wanted", function()
    for text, line in pairs({
      ["column `chosen` is missing, wanted a string or a list of messages"] = '{"prompt": "a"}',
      ["column `rejected` is a number, wanted a string or a list of messages"] =
        '{"prompt": "a", "chosen": "b", "rejected": 1}',
      ["column `rejected` is a list, wanted a string"] =
        '{"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "x"}]}',
      ["column `prompt` is a number, wanted a string or a list of messages"] =
        '{"prompt": 1, "chosen": "b", "rejected": "c"}',
      ["column `prompt` is empty, wanted at least one token"] =
        '{"prompt": "", "chosen": "b", "rejected": "c"}',
      ["column `prompt` is a string, wanted a list of messages, or answers with the same"] =
        '{"prompt": "a", "chosen": [{"role": "user", "content": "x"}],'
        .. ' "rejected": [{"role": "user", "content": "y"}]}',
      ["column `chosen` is a string, wanted a list of messages"] =
        '{"prompt": [{"role": "user", "content": "x"}], "chosen": "b", "rejected": "c"}',
      ["column `chosen[1].role` is missing, wanted a string"] =
        '{"chosen": [{"content": "x"}], "rejected": [{}]}',
      ["column `prompt` is missing, wanted a string, or answers with the same beginning"] =
        '{"chosen": "b", "rejected": "c"}',
      ["column `chosen` is all prompt, wanted an answer behind the common beginning"] =
        '{"chosen": "ab", "rejected": "abc"}',
      ["column `rejected` is all prompt"] = '{"chosen": "abc", "rejected": "ab"}',
      ["the row has 13 tokens, wanted at most 12; max_length cuts it"] =
        '{"prompt": "1234567890", "chosen": "bb", "rejected": "c"}',
    }) do
      with_rows({ '{"prompt": "1", "chosen": "2", "rejected": "3"}', line }, function(path)
        helper.raises(function()
          data.pairs(path, new_tokenizer(), { context = 12 })
        end, path .. ":2: " .. text)
      end)
    end
  end)
end)

describe("labelled answers of a file", function()
  it("have a label, or are pairs that become two answers", function()
    local lines = {
      '{"prompt": "1+1=", "completion": "2", "label": true}',
      '{"prompt": "1+2=", "completion": "4", "label": false}',
      '{"prompt": "1+3=", "chosen": "4", "rejected": "5"}',
    }
    assert.same({
      { "1+1=", "2\0", true }, { "1+2=", "4\0", false }, { "1+3=", "4\0", "5\0" },
    }, read(lines, "labelled"))
    with_rows(lines, function(path)
      local rows = data.unpair(data.labelled(path, new_tokenizer(), {}))
      local labels = {}
      for i, row in ipairs(rows) do
        labels[i] = row.label
      end
      assert.same({ true, false, true, false }, labels)
      assert.equal("5\0", text_of(rows[4].completion))
    end)
  end)

  it("that are wrong are named by file and line", function()
    for text, line in pairs({
      ["column `label` is missing, wanted true or false"] = '{"prompt": "a", "completion": "b"}',
      ["column `label` is a number, wanted true or false"] =
        '{"prompt": "a", "completion": "b", "label": 1}',
      ["column `completion` is missing, wanted a string or a list of messages"] =
        '{"prompt": "a", "label": true}',
    }) do
      with_rows({ line }, function(path)
        helper.raises(function()
          data.labelled(path, new_tokenizer(), {})
        end, path .. ":1: " .. text)
      end)
    end
  end)

  it("are each given the answer to another prompt", function()
    local rows = {}
    for i = 1, 9 do
      rows[i] = { ids = { math.ceil(i / 2) }, completion = { i, i, i } }
    end
    for seed = 1, 5 do
      data.mismatch(rows, rows, seed, 3)
      for _, row in ipairs(rows) do
        assert.are_not.equal(row.ids[1], math.ceil(row.mismatched[1] / 2))
        assert.equal(2, #row.mismatched)
      end
    end
    helper.raises(function()
      data.mismatch(rows, { rows[1], rows[2] }, 1)
    end, "kto: one prompt in 2 rows, wanted at least 2 prompts")
  end)
end)

describe("a batch of pairs", function()
  local rows = {
    { ids = { 1, 2 }, chosen = { 3, 4, 5 }, rejected = { 6 } },
    { ids = { 7 }, chosen = { 8 }, rejected = { 9, 10 } },
    { ids = { 11, 12, 13 }, chosen = { 14, 15 }, rejected = { 16, 17 } },
  }

  it("has the chosen answers first, and never tears a pair apart", function()
    local batch = preference.batch(rows, preference.pair)
    assert.equal(23, batch.num_tokens)
    local micro = batch:split(0)()
    assert.same({ 0, 3, 4, 6, 7, 9, 11 }, micro.completion_cu:to_table())
    local seen = {}
    for part in batch:split(13) do
      seen[#seen + 1] = #part.items
      assert.equal(3, part.total_rows)
      assert.equal(6, part.total_tokens)
      assert.equal(2 * #part.items, part.completion_cu:numel() - 1)
    end
    assert.same({ 2, 1 }, seen)
  end)

  it("of ORPO predicts the chosen sequences' prompts too", function()
    local batch = preference.batch(rows, preference.pair, true)
    local micro = batch:split(0)()
    assert.same({ 0, 1, 4, 4, 5, 7, 9, 9, 10, 10, 12, 12, 14 }, micro.answer_cu:to_table())
    assert.equal(9, micro.total_tokens)
    local target = {}
    for _, i in ipairs(micro.rows:to_table()) do
      target[#target + 1] = micro.target:to_table()[i + 1]
    end
    assert.same({ 2, 3, 4, 5, 8, 12, 13, 14, 15, 6, 9, 10, 16, 17 }, target)
  end)

  it("has the same loss, gradient and rewards however it is cut", function()
    local model = decoder.from_config(sums.config):init(3, sums.init_std)
    local reference = decoder.from_config(sums.config):init(4, sums.init_std)
    local function run(method, options, with_prompt, limit)
      local batch, parts = preference.batch(rows, preference.pair, with_prompt), {}
      for micro in batch:split(limit) do
        preference.set_reference(micro, reference, preference.logps)
        local logp, seen = preference.logprob(model, micro)
        local loss, values = method.loss(micro, logp, options)
        loss:backward()
        parts[#parts + 1] = preference.sums(micro, loss, values, seen)
      end
      local grads = {}
      for i, p in ipairs(model:parameters()) do
        grads[i], p.tensor.grad = p.tensor.grad, nil
      end
      return preference.metrics(preference.total(parts)), grads
    end
    for _, case in ipairs({
      { dpo, dpo.options({ loss_type = "sigmoid,sft" }) }, { orpo, orpo.options(), true },
    }) do
      local metrics, grads = run(case[1], case[2], case[3], 0)
      local cut_metrics, cut_grads = run(case[1], case[2], case[3], 1)
      for name, x in pairs(metrics) do
        helper.close(cut_metrics[name], x, 1e-5, name)
      end
      for i, grad in ipairs(grads) do
        helper.close(cut_grads[i], grad, 1e-4, "gradient " .. i)
      end
    end
  end)

  -- Sum over a row's answers in one column of the mean logit, their tokens and the right ones.
  local function add_logits(total, model, row, answer)
    local sequence = {}
    for _, list in ipairs({ row.ids, answer }) do
      for _, id in ipairs(list) do
        sequence[#sequence + 1] = id
      end
    end
    local logits = model:logits(sequence):to_table()
    for k, id in ipairs(answer) do
      local z, sum, best = logits[#row.ids + k - 1], 0, 1
      for v, x in ipairs(z) do
        sum, best = sum + x, x > z[best] and v or best
      end
      total.sum, total.tokens = total.sum + sum / #z, total.tokens + 1
      total.right = total.right + (best - 1 == id and 1 or 0)
    end
  end

  it("has the mean logit of its answers, and how often the chosen ones are predicted", function()
    local model = decoder.from_config(sums.config):init(3, 0.3)
    local function measured(list, columns, with_prompt, limit)
      local parts = {}
      for micro in preference.batch(list, columns, with_prompt):split(limit) do
        local logp, seen = preference.logprob(model, micro)
        local logps = preference.logps(micro, logp)
        local values = { logps = logps, rewards = logps }
        parts[#parts + 1] = preference.sums(micro, fn.sum(logp), values, seen)
      end
      return preference.metrics(preference.total(parts))
    end
    local chosen = { sum = 0, tokens = 0, right = 0 }
    local rejected, labelled = { sum = 0, tokens = 0, right = 0 }, {}
    -- What the model predicts, so that some of it is right.
    local made = {}
    for i, row in ipairs(rows) do
      local z = model:logits(row.ids):to_table()[#row.ids]
      local best = 1
      for v = 1, #z do
        best = z[v] > z[best] and v or best
      end
      made[i] = {
        ids = row.ids, chosen = { best - 1, unpack(row.chosen) }, rejected = row.rejected,
      }
      add_logits(chosen, model, row, made[i].chosen)
      add_logits(rejected, model, row, row.rejected)
      labelled[2 * i - 1] = { ids = row.ids, completion = made[i].chosen, label = true }
      labelled[2 * i] = { ids = row.ids, completion = row.rejected, label = false }
    end
    assert.is_true(chosen.right >= 3)
    for _, case in ipairs({
      { made, preference.pair, false, 0 }, { made, preference.pair, false, 1 },
      { made, preference.pair, true, 1 }, { labelled, { "completion" }, false, 9 },
    }) do
      local metrics = measured(unpack(case))
      helper.close(metrics["logits/chosen"], chosen.sum / chosen.tokens, 1e-5)
      helper.close(metrics["logits/rejected"], rejected.sum / rejected.tokens, 1e-5)
      helper.close(metrics.mean_token_accuracy, chosen.right / chosen.tokens, 1e-7)
    end
    local metrics = measured({ labelled[2] }, { "completion" }, false, 0)
    assert.is_nil(metrics["logits/chosen"])
    assert.is_nil(metrics.mean_token_accuracy)
    assert.equal("number", type(metrics["logits/rejected"]))
  end)

  it("has a reward of exactly 0 where the policy is the reference", function()
    local model = decoder.from_config(sums.config):init(3, sums.init_std)
    local micro = preference.batch(rows, preference.pair):split(0)()
    preference.set_reference(micro, model:copy(), preference.logps)
    local _, values = dpo.loss(micro, (model:logprob(micro)), dpo.options())
    assert.same({ 0, 0, 0, 0, 0, 0 }, values.rewards:to_table())
  end)

  it("has the log of the sum of squared probabilities for WPO", function()
    local model = decoder.from_config(sums.config):init(3, sums.init_std)
    local micro = preference.batch(rows, preference.pair):split(0)()
    local hidden = model:hidden(micro)
    local _, _, lse = model:logprob(micro, nil, hidden)
    local logits, wanted = model:logits(micro):to_table(), {}
    for k, i in ipairs(micro.rows:to_table()) do
      local total, squares = 0, 0
      for _, z in ipairs(logits[i + 1]) do
        total, squares = total + math.exp(z), squares + math.exp(2 * z)
      end
      wanted[k] = math.log(squares) - 2 * math.log(total)
    end
    helper.close(preference.log_p2(model, micro, hidden, lse), wanted, 1e-5)
  end)
end)

describe("pairs of the model's own answers", function()
  -- The rollouts of an untrained model on a few sums, as in a run, by a reward.
  local function new_rollouts(reward)
    local task = sums.new(1)
    task.train = { unpack(task.train, 1, 300) }
    task.model = decoder.from_config(sums.config):init(1, sums.init_std)
    task.model.stop_ids, task.max_completion_length = { sums.newline }, sums.longest
    local run = {
      config = { seed = 1 },
      should_stop = function()
        return false
      end,
      parts = function(_, rows, size)
        local at = 0
        return function()
          local part = { unpack(rows, at + 1, at + size) }
          at = at + size
          return #part > 0 and part or nil
        end
      end,
    }
    return rollouts.new(run, task, reward), task
  end

  it("have the right answer chosen and the sampled one rejected where that is wrong", function()
    local scope = memory.open_scope()
    local r, task = new_rollouts(function(_, row)
      return tonumber(row.answer) % 2
    end)
    local even = {}
    for _, row in ipairs(task.train) do
      even[#even + 1] = tonumber(row.answer) % 2 == 0 and row or nil
    end
    r:make_pairs()
    assert.equal(#even, #task.train)
    for i, row in ipairs(task.train) do
      assert.equal(even[i].ids, row.ids)
      assert.equal(even[i].completion, row.chosen)
      assert.is_true(#row.rejected > 0)
    end
    memory.close_scope(scope)
  end)

  it("end where there are enough, and are refused where no answer is wrong", function()
    local scope = memory.open_scope()
    local r, task = new_rollouts(function()
      return 0
    end)
    r:make_pairs(10)
    assert.equal(128, #task.train)
    r = new_rollouts(function()
      return 1
    end)
    helper.raises(function()
      r:make_pairs()
    end, "pairs: all 300 sampled answers are right, wanted wrong ones; lower sft_until")
    memory.close_scope(scope)
  end)
end)
