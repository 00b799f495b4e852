-- The recipes as they are run: small, with a fixed seed, through the program.
local helper = require("spec.helper")
local recipes = require("spec.recipe")
local cjson = require("cjson")
local config = require("liger.train.config")
local sums = require("liger.data.sums")
local task = require("liger.train.task")

local start, run, with = recipes.start, recipes.run, recipes.with
local column, finite, write = recipes.column, recipes.finite, recipes.write
local lines_of = recipes.lines_of
local root, count

setup(function()
  root, count = recipes.open(), 0
end)

teardown(recipes.close)

-- Shorter completions earn more: a signal from the first step on.
local SHORT = "return function(_, _, sample) return 1 - #sample.completion / 5 end"
local GRPO = {
  max_steps = 3, prompts_per_step = 4, num_generations = 4, sft_until = 0, seed = 1, threads = 1,
  warmup_steps = 0, eval_rows = 9,
}

local function run_grpo(options)
  return run("grpo", with(GRPO, { reward = write("short.lua", SHORT) }, options or {}))
end

local data_alone = "--data without --model: wanted a checkpoint beside it; the built-in model "
  .. "becomes one by `liger run sft --save FOLDER`, then --model FOLDER"

describe("recipes/sft.lua", function()
  local OPTIONS = { max_steps = 5, batch_size = 16, warmup_steps = 2, seed = 1, threads = 1 }

  it("has its recorded losses", function()
    local metrics = run("sft", OPTIONS).metrics
    helper.close(column(metrics, "loss"), {
      5.49344443, 5.72507753, 4.94653822, 4.28201268, 3.98301998,
    }, 1e-5, "loss")
  end)

  it("trains with label smoothing and with dft", function()
    -- The first step has rate 0. dft's loss is p times nll, and p is small at first.
    local plain = run("sft", OPTIONS).metrics
    for _, options in ipairs({ { label_smoothing_factor = 0.1 }, { loss_type = "dft" } }) do
      local metrics = run("sft", with(OPTIONS, options)).metrics
      assert.are_not.equal(plain[1].loss, metrics[1].loss)
      assert.equal(plain[1].entropy, metrics[1].entropy)
      assert.are_not.equal(plain[5].entropy, metrics[5].entropy)
      assert.is_true(metrics[5].loss < metrics[1].loss or options.loss_type ~= nil)
      assert.is_true(metrics[1].loss < plain[1].loss or options.loss_type == nil)
    end
  end)

  it("gives the same lines for the same seed, on any number of threads", function()
    local first = run("sft", OPTIONS)
    assert.same(first.metrics, run("sft", OPTIONS).metrics)
    assert.same(first.metrics, run("sft", with(OPTIONS, { threads = 2 })).metrics)
    assert.are_not.same(first.metrics, run("sft", with(OPTIONS, { seed = 2 })).metrics)
  end)

  it("B90: gives step k of a straight line the rate (n + 1 - k) / n", function()
    for _, warmup in ipairs({ 0, 2 }) do
      local metrics = run("sft", with(OPTIONS, {
        max_steps = 10, warmup_steps = warmup, learning_rate = 1e-5, lr_scheduler_type = "linear",
      })).metrics
      for k, line in ipairs(metrics) do
        local wanted = 1e-5 * (11 - k) / (10 - warmup)
        if k <= warmup then
          wanted = 1e-5 * (k - 1) / warmup
        end
        helper.close(line.learning_rate / 1e-5, wanted / 1e-5, 1e-8)
      end
    end
  end)

  it("says how the held-out samples went before and after", function()
    local made = run("sft", OPTIONS)
    local before = made.output:match(
      "held%-out before: (%d+%.%d%d%d%d) loss, %d%.%d%d%d token accuracy\n"
    )
    local after = made.output:match(
      "held%-out after: (%d+%.%d%d%d%d) loss, %d%.%d%d%d token accuracy\n"
    )
    assert.is_true(tonumber(after) < tonumber(before))
  end)

  it("changes nothing by recomputing layers, next to nothing by smaller micro-batches", function()
    local plain = run("sft", OPTIONS).metrics
    assert.same(plain, run("sft", with(OPTIONS, { gradient_checkpointing = true })).metrics)
    local split = run("sft", with(OPTIONS, { micro_tokens = 40 })).metrics
    helper.close(column(split, "loss"), column(plain, "loss"), 1e-5)
    assert.same(column(plain, "num_tokens"), column(split, "num_tokens"))
    -- Prompts count too, as in TRL: 16 of "37+58=" with "95" or "108", and a newline.
    assert.is_true(plain[1].num_tokens >= 16 * 9 and plain[1].num_tokens <= 16 * 10)
    assert.equal(plain[1].num_tokens + plain[2].tokens, plain[2].num_tokens)
  end)

  it("learns prompt and completion, texts and chats of a file, and saves what it learnt", function()
    local made = run("sft", with(OPTIONS, { save = root .. "/sums" }))
    finite(made)
    local rows = {}
    for i = 1, 12 do
      rows[i] = i % 2 == 0 and ('{"prompt": "%d+1=", "completion": "%d\\n"}'):format(i, i + 1)
        or ('{"text": "%d and %d"}'):format(i, i + 1)
    end
    local data = write("data.jsonl", table.concat(rows, "\n"))
    local again = run("sft", {
      model = root .. "/sums", data = data, max_steps = 3, batch_size = 4, holdout = 0.2,
    })
    finite(again)
    assert.equal(3, #again.metrics)
    assert.is_truthy(again.output:find("held-out before: ", 1, true))
  end)
end)

describe("recipes/grpo.lua", function()
  it("has its recorded numbers in the warm-up and after", function()
    local made = run_grpo({ max_steps = 5, eval_rows = 1000 })
    helper.close(column(made.phase("warm-up"), "loss"), {
      5.64200926, 5.57330132, 5.34691763, 5.14238501, 4.84987926, 4.60005474, 4.30605364,
      4.04865885, 3.82253408, 3.64075232,
    }, 1e-5, "warm-up loss")
    local lines = made.phase("grpo")
    helper.close(column(lines, "reward"), { 0.0875, 0.1875, 0.175, 0.2625, 0.35 }, 1e-5, "reward")
    helper.close(column(lines, "loss"), {
      0.0804011449, 0.24583514, 0.190362662, 0.351468533, 0.340532929,
    }, 1e-5, "loss")
    helper.close(column(lines, "grad_norm"), {
      1.32396027, 2.71746276, 1.89457059, 2.96663072, 3.14034103,
    }, 1e-4, "grad_norm")
  end)

  it("gives the same lines for the same seed, on any number of threads", function()
    local first = run_grpo()
    local second = run_grpo()
    assert.same(first.metrics, second.metrics)
    assert.equal(
      helper.read(first.folder .. "/samples.jsonl"), helper.read(second.folder .. "/samples.jsonl")
    )
    assert.same(first.metrics, run_grpo({ threads = 2 }).metrics)
    assert.are_not.same(first.metrics, run_grpo({ seed = 2 }).metrics)
  end)

  it("changes next to nothing by smaller micro-batches", function()
    local plain, split = run_grpo().phase("grpo"), run_grpo({ micro_tokens = 20 }).phase("grpo")
    for _, name in ipairs({ "reward", "loss", "grad_norm", "entropy" }) do
      helper.close(split[1][name], plain[1][name], 1e-5, name)
    end
  end)

  it("says how often held-out problems were solved before and after", function()
    local made = run_grpo()
    for _, when in ipairs({ "before", "after" }) do
      local form = "held%-out accuracy " .. when .. ": %-?%d+%.%d%d sampled, %-?%d+%.%d%d greedy\n"
      assert.is_truthy(made.output:find(form), made.output)
    end
  end)

  it("runs with each of its methods", function()
    local plain = run_grpo()
    finite(plain)
    assert.is_nil(plain.metrics[#plain.metrics].kl)
    for _, options in ipairs({
      { beta = 0.04 },
      { dtype = "bf16" },
      { loss_type = "dr_grpo" },
      { loss_type = "grpo" },
      { num_iterations = 2 },
      { mask_truncated_completions = true },
      { scale_rewards = "batch" },
      { scale_rewards = "none" },
      { temperature = 0.7, top_k = 20 },
      { top_p = 0.9, min_p = 0.01 },
      { lr_scheduler_type = "cosine", weight_decay = 0.1, max_grad_norm = 0 },
      { importance_sampling_level = "sequence", num_iterations = 2 },
      { delta = 1.01, epsilon_high = 0.001, epsilon = 0.001, num_iterations = 2 },
      { loss_type = "luspo", importance_sampling_level = "sequence", learning_rate = 1e-4 },
      { loss_type = "cispo", epsilon_high = 5 },
      { loss_type = "sapo" },
      { loss_type = "vespo", sampler_mode = "sequence_truncate" },
      { sampler_mode = "token_mask", sampler_clip_min = 0.5, top_p = 0.9 },
      { off_policy_mask_threshold = 0.001, num_iterations = 3 },
      { top_entropy_quantile = 0.5 },
      { entropy_coef = 0.1 },
    }) do
      local made, text = run_grpo(options), cjson.encode(options)
      finite(made)
      local lines = made.phase("grpo")
      assert.equal(3, #lines, text)
      assert.are_not.same(plain.phase("grpo"), lines, text)
      assert.is_true(lines[3].grad_norm > 0, text)
      if options.beta then
        assert.equal(0, lines[1].kl)
        assert.is_true(lines[3].kl > 0)
      end
      local last, names = lines[3], {
        cispo = "cispo_clip_ratio", vespo = "vespo/phi_seq_mean",
      }
      assert.equal("number", type(last[names[options.loss_type] or "entropy"]), text)
      if options.sampler_mode then
        -- The sampler's log-probabilities are those of a training forward.
        assert.equal(1, last["sampling/importance_sampling_ratio/min"])
        assert.equal(0, last["sampling/sampling_logp_difference/max"])
      elseif options.entropy_coef then
        assert.equal(0.1, last.entropy_coef)
        helper.close(last.loss, last.policy_loss - 0.1 * last.entropy, 1e-6)
      end
      if options.delta then
        assert.is_true(lines[3]["clip_ratio/region_mean"] > 0)
      end
    end
    -- On one device the tokens of the batch are all there are.
    assert.same(plain.metrics, run_grpo({ loss_type = "bnpo" }).metrics)
  end)

  it("solves more after training than before", function()
    -- Long enough to see the reward rise: shorter answers.
    local made = run_grpo({
      max_steps = 25, prompts_per_step = 8, learning_rate = 2e-3, eval_rows = 1000,
    })
    local rewards = column(made.phase("grpo"), "reward")
    local first, last = 0, 0
    for i = 1, 5 do
      first, last = first + rewards[i] / 5, last + rewards[#rewards - i + 1] / 5
    end
    assert.is_true(last > first + 0.1, ("%g, %g"):format(first, last))
  end)

  it("trains a checkpoint on a file of prompts with a reward of one's own", function()
    local saved = root .. "/grpo"
    run_grpo({ save = saved })
    for _, name in ipairs({ "config.json", "model.safetensors", "tokenizer.json" }) do
      assert.is_true(helper.exists(saved .. "/" .. name), name)
    end
    local rows = {}
    for i = 1, 10 do
      rows[i] = ('{"prompt": "%d+%d=", "answer": "%d"}'):format(i + 10, i + 20, 2 * i + 30)
    end
    local data = write("prompts.jsonl", table.concat(rows, "\n"))
    local options = {
      model = saved, data = data, max_steps = 2, prompts_per_step = 2, num_generations = 4,
      holdout = 0.3,
      max_completion_length = 6, threads = 1, reward = write("short.lua", SHORT),
    }
    local made = run("grpo", options)
    finite(made)
    assert.equal(2, #made.metrics)
    assert.same({}, made.phase("warm-up"))
    assert.is_truthy(made.output:find("held%-out reward before: "))
    finite(run("grpo", with(options, { reward = "numeric" })))
  end)

  it("stops with one line at a reward that fails", function()
    local function stops(wanted, reward, ...)
      count = count + 1
      local output, status = start("grpo", with(GRPO, {
        reward = reward, out = ("%s/%d"):format(root, count),
      }))
      assert.equal(wanted, status)
      for _, text in ipairs({ ... }) do
        assert.is_truthy(output:find(text, 1, true), output)
      end
      local _, newlines = output:gsub("\n", "")
      assert.equal(1, newlines, output)
    end
    stops(
      1, write("none.lua", "return function() end"),
      "reward: it gave nil for each of 256 completions"
    )
    stops(
      1, write("raises.lua", "return function() error('out of luck') end"),
      "raises.lua:1: out of luck"
    )
    stops(2, "best", "reward: best is none; wanted exact, numeric or a Lua file")
    stops(2, "exact,exact", "reward: two are named exact")
    stops(2, root .. "/gone.lua", "reward: cannot open " .. root .. "/gone.lua")
    stops(2, write("wrong.lua", "return 1"), "wrong.lua returned number, wanted a function")
  end)

  it("stops with one line at a loss of one's own that is wrong", function()
    local function stops(status, text, ...)
      count = count + 1
      local path = text and write("own.lua", text) or root .. "/gone.lua"
      local output, got = start("grpo", with(GRPO, {
        loss = path, out = ("%s/%d"):format(root, count),
        reward = write("short.lua", SHORT),
      }))
      for _, wanted in ipairs({ ... }) do
        assert.is_truthy(output:find(wanted:format(path), 1, true), output)
      end
      local _, newlines = output:gsub("\n", "")
      assert.equal(1, newlines, output)
      assert.equal(status, got)
    end
    stops(2, nil, "loss: cannot open %s")
    stops(2, "return function(", "loss: %s:1: ", "expected near")
    stops(2, "return { 1 }", "loss: %s returned table, wanted a function(batch, logp, options)")
    stops(1, "return function() end", "loss: %s returned nil, wanted f32 [", "] as logp")
    stops(1, "return function(_, logp) return logp:sum() end",
      "loss: %s returned f32 [], wanted f32 [", "] as logp")
    stops(1, "return function(batch, logp) return logp * (0 / 0) end",
      "loss: %s gave nan for completion 1, wanted finite numbers; the completion is ")
    stops(1, "return function(batch, logp) return logp / 0 end",
      "loss: %s gave inf for completion 1")
    stops(1, "return function() return nil + 1 end", "own.lua:1: attempt to perform arithmetic")
  end)
end)

describe("recipes/distill.lua", function()
  local OPTIONS = {
    max_steps = 4, batch_size = 8, teacher_until = 0, warmup_steps = 0, eval_rows = 9, seed = 1,
    threads = 1,
  }

  local function run_distill(options)
    return run("distill", with(OPTIONS, options or {}))
  end

  -- The recipe is refused: with this status and, in its message, this text.
  local function refused_here(status, message, options)
    count = count + 1
    local output, got = start("distill", with({ out = ("%s/%d"):format(root, count) }, options))
    assert.is_truthy(output:find(message, 1, true), output)
    assert.equal(status, got)
  end

  -- A student, a teacher and data in files.
  local function given()
    local model, teacher = root .. "/student", root .. "/teacher"
    if not helper.exists(model .. "/config.json") then
      run("sft", { max_steps = 1, batch_size = 4, eval_rows = 9, seed = 1, save = model })
      run("sft", { max_steps = 9, batch_size = 64, eval_rows = 9, seed = 2, save = teacher })
    end
    local rows = {}
    for i = 1, 12 do
      rows[i] = ('{"prompt": "%d+%d=", "completion": "%d\\n"}'):format(i, i, 2 * i)
    end
    return { model = model, data = write("sums.jsonl", table.concat(rows, "\n")), batch_size = 4,
      max_steps = 3, max_completion_length = 4, seed = 1, learning_rate = 1e-3 }, teacher
  end

  it("has its recorded losses", function()
    local lines = run_distill({ max_steps = 6 }).phase("distill")
    helper.close(column(lines, "loss"), {
      5.6164785, 0.293362202, 0.258672494, 4.47958304, 4.32029826, 0.210852265,
    }, 1e-5, "loss")
    helper.close(column(lines, "on_policy"), { 0, 1, 1, 0, 0, 1 }, 0)
  end)

  it("gives the same lines for the same seed, on any number of threads", function()
    local first = run_distill()
    assert.same(first.metrics, run_distill().metrics)
    assert.same(first.metrics, run_distill({ threads = 2 }).metrics)
    assert.are_not.same(first.metrics, run_distill({ seed = 2 }).metrics)
  end)

  it("changes next to nothing by smaller micro-batches", function()
    local plain = run_distill({ lmbda = 0 }).phase("distill")
    local split = run_distill({ lmbda = 0, micro_tokens = 20 }).phase("distill")
    for _, name in ipairs({ "loss", "hard_loss", "soft_loss", "entropy", "grad_norm" }) do
      helper.close(column(split, name), column(plain, name), 1e-4, name)
    end
    assert.same(column(plain, "num_tokens"), column(split, "num_tokens"))
  end)

  it("runs with each of its losses, on data and on the student's own completions", function()
    local plain = run_distill()
    for _, options in ipairs({
      { loss_type = "jsd", beta = 0.1 }, { loss_type = "forward_kl", loss_temperature = 2 },
      { loss_type = "reverse_kl", temperature = 0.5 }, { loss_type = "tvd", weight_hard = 0.5 },
      { loss_type = "cosine" }, { lmbda = 1 }, { lmbda = 0 }, { dtype = "bf16" },
      { weight_soft = 2, max_grad_norm = 0 },
    }) do
      local made, text = run_distill(options), cjson.encode(options)
      finite(made)
      local lines = made.phase("distill")
      assert.equal(4, #lines, text)
      assert.are_not.same(plain.phase("distill"), lines, text)
      for _, line in ipairs(lines) do
        assert.is_true(line.grad_norm > 0, text)
        assert.equal(options.lmbda or line.on_policy, line.on_policy)
      end
    end
  end)

  it("leaves the cross entropy out on the student's own completions", function()
    for _, line in ipairs(run_distill({ lmbda = 1, weight_soft = 3 }).phase("distill")) do
      helper.close(line.loss, 3 * line.soft_loss, 1e-6)
    end
    for _, line in ipairs(run_distill({ lmbda = 0, weight_soft = 3 }).phase("distill")) do
      helper.close(line.loss, line.hard_loss + 3 * line.soft_loss, 1e-6)
    end
  end)

  it("says how held-out samples went before and after", function()
    local made = run_distill({ max_steps = 12, batch_size = 32, eval_rows = 64 })
    local loss = {}
    for _, who in ipairs({ "teacher", "before", "after" }) do
      loss[who] = made.output:match(
        "held%-out " .. who .. ": (%d+%.%d%d%d%d) loss, %d%.%d%d%d token accuracy, "
          .. "%d%.%d%d sampled, %d%.%d%d greedy right\n"
      )
    end
    assert.is_true(tonumber(loss.after) < tonumber(loss.before))
  end)

  it("distils one checkpoint into another, and saves it", function()
    local options, teacher = given()
    local made = run("distill", with(options, { teacher = teacher, save = root .. "/distilled" }))
    finite(made)
    assert.equal(3, #made.metrics)
    assert.is_true(helper.exists(root .. "/distilled/model.safetensors"))
    assert.is_truthy(made.output:find("held%-out after: %d+%.%d%d%d%d loss, "))
  end)

  it("takes the teacher's log-probabilities from a file", function()
    local options, teacher = given()
    local model = require("liger.model").load(teacher)
    local lines = {}
    for i = 1, 12 do
      local text, answer = ("%d+%d="):format(i, i), ("%d\n"):format(2 * i)
      local sequence = { (text .. answer):byte(1, -1) }
      local z = model:logits(sequence):to_table()
      local row = { ids = {}, logprobs = {} }
      for t = 1, #answer do
        local of_row, total = z[#text + t - 1], 0
        for _, x in ipairs(of_row) do
          total = total + math.exp(x)
        end
        local ids, logprobs = {}, {}
        for v, x in ipairs(of_row) do
          ids[v], logprobs[v] = v - 1, math.min(x - math.log(total), 0)
        end
        row.ids[t], row.logprobs[t] = ids, logprobs
      end
      lines[i] = cjson.encode(row)
    end
    local file = write("teacher.jsonl", table.concat(lines, "\n"))
    for _, loss_type in ipairs({ "ce_tvd", "jsd" }) do
      local o = with(options, { loss_type = loss_type, max_completion_length = "none" })
      local whole = run("distill", with(o, { teacher = teacher, lmbda = 0 }))
      local known = run("distill", with(o, { teacher_logprobs = file }))
      for _, name in ipairs({ "loss", "soft_loss", "grad_norm" }) do
        helper.close(column(known.metrics, name), column(whole.metrics, name), 1e-4, name)
      end
    end
    refused_here(2, "--lmbda above 0 needs --teacher: a file knows nothing of new completions",
      with(options, { teacher_logprobs = file, lmbda = 0.5 }))
  end)

  it("needs prompts for completions of its own", function()
    local options, teacher = given()
    local text = write("text.jsonl", ('{"text": "1+1=2"}\n'):rep(4))
    refused_here(1, ": column `prompt` is missing, wanted what to complete, or --lmbda 0",
      with(options, { data = text, teacher = teacher }))
    finite(run("distill", with(options, {
      data = text, teacher = teacher, lmbda = 0, max_completion_length = "none",
    })))
    refused_here(1, " tokens and max_completion_length is 99, wanted at most 64 together",
      with(options, { teacher = teacher, max_completion_length = 99 }))
  end)

  it("refuses a teacher of another tokenizer", function()
    local options, teacher = given()
    local other = root .. "/other"
    assert.equal(0, os.execute(("cp -r %q %q"):format(teacher, other)))
    local text = helper.read(teacher .. "/tokenizer.json")
    write("other/tokenizer.json", (text:gsub('"A":65,"B":66', '"B":65,"A":66')))
    refused_here(1, ('%s: token 65 is "B", wanted "A" as in %s: distillation needs one tokenizer')
      :format(other, options.model), with(options, { teacher = other }))
  end)

  it("refuses a teacher too few or too many", function()
    local options, teacher = given()
    local message = "--model needs a teacher: --teacher or --teacher_logprobs, one of them"
    refused_here(2, message, options)
    refused_here(2, message, with(options, {
      teacher = teacher, teacher_logprobs = "x", max_completion_length = "none",
    }))
    for _, name in ipairs({ "teacher", "teacher_logprobs" }) do
      refused_here(2, ("--%s without --model: it needs a student and data"):format(name),
        { [name] = teacher })
    end
    local data = options.data
    refused_here(2, data_alone, { data = data, teacher = teacher })
  end)
end)

describe("a recipe", function()
  -- A recipe that is refused: its message, with this status and no folder.
  local function refused(recipe, status, message, options)
    count = count + 1
    local folder = ("%s/%d"):format(root, count)
    local output, got = start(recipe, with({ out = folder }, options))
    assert.equal("liger: " .. message .. "\n", output)
    assert.equal(status, got)
    assert.is_false(helper.exists(folder .. "/config.json"))
  end

  it("B104: refuses values out of range before it makes anything", function()
    local common = {
      holdout = { "0", "1" }, eval_rows = { "0", "1.5" }, max_steps = { "-1", "0.5" },
      learning_rate = { "-1", "x" }, lr_scheduler_type = { "triangle" }, warmup_steps = { "-1" },
      weight_decay = { "-0.1" }, max_grad_norm = { "-1" }, micro_tokens = { "-1", "2.5" },
    }
    local own = {
      sft = {
        max_length = { "0" }, num_train_epochs = { "0" }, batch_size = { "0" },
        per_device_train_batch_size = { "0" }, loss_type = { "mse" },
        label_smoothing = { "-0.1", "1.1" },
      },
      distill = {
        max_length = { "0" }, num_train_epochs = { "0" }, batch_size = { "0" },
        per_device_train_batch_size = { "0" }, loss_type = { "kl" }, beta = { "-1", "2" },
        temperature = { "0" }, loss_temperature = { "0" }, weight_hard = { "-1" },
        weight_soft = { "-1" }, lmbda = { "-1", "2" }, max_completion_length = { "0" },
        teacher_until = { "-1", "2" },
      },
      grpo = {
        prompts_per_step = { "0" }, num_generations = { "1" }, max_completion_length = { "0" },
        num_iterations = { "0" }, cache_bytes = { "0" }, temperature = { "0" }, top_k = { "-1" },
        top_p = { "0", "1.1" }, min_p = { "-1", "2" }, loss_type = { "ppo" }, epsilon = { "-1" },
        epsilon_high = { "-1" }, delta = { "0" }, beta = { "-1" }, sft_learning_rate = { "-1" },
        importance_sampling_level = { "batch" }, scale_rewards = { "all" },
        off_policy_mask_threshold = { "x" }, top_entropy_quantile = { "-1", "2" },
        entropy_coef = { "-1" }, sampler_mode = { "token" }, sampler_clip_min = { "-1" },
        sampler_clip_max = { "0" }, sapo_temperature_pos = { "0" }, sapo_temperature_neg = { "0" },
        vespo_k_pos = { "-1" }, vespo_lambda_pos = { "-1" }, vespo_k_neg = { "-1" },
        vespo_lambda_neg = { "-1" },
        multi_objective_aggregation = { "sum" }, sft_until = { "-1", "2" },
      },
    }
    for recipe, lists in pairs(own) do
      for name, values in pairs(with(common, lists)) do
        for _, value in ipairs(values) do
          config.set_command({
            recipe = recipe, args = { "--" .. name, value, "--out", root .. "/refused" }, text = "",
          })
          local ok, problem = pcall(loadfile(("recipes/%s.lua"):format(recipe)))
          config.set_command(nil)
          assert.is_false(ok)
          assert.equal(2, type(problem) == "table" and problem.code, name)
          local wanted = ("got %q, wanted "):format(value)
          assert.is_truthy(problem.message:find(wanted, 1, true), problem.message)
        end
      end
    end
    assert.is_false(helper.exists(root .. "/refused"))
  end)

  it("refuses what its task or its reward lacks before it makes anything", function()
    local model = root .. "/refusing"
    run_grpo({ max_steps = 0, save = model })
    local data = write("lacks.jsonl", '{"prompt": "1", "answer": "x"}\n{"prompt": "2"}\n')
    local given = { model = model, data = data, max_completion_length = 5 }
    refused("grpo", 1, data .. ":2: column `answer` is missing, wanted a string or a number", given)
    refused("grpo", 1, data .. ":1: column `answer` is \"x\", wanted a number in it",
      with(given, { reward = "numeric" }))
    refused(
      "grpo", 1,
      data .. ":1: column `prompt` has 1 token and max_completion_length is 99, wanted at most 64 "
        .. "together",
      with(given, { max_completion_length = 99, reward = write("short.lua", SHORT) })
    )
    for _, recipe in ipairs({ "grpo", "sft" }) do
      refused(recipe, 2, data_alone, { data = data })
      refused(recipe, 2, ("--save: %s/x: cannot be made: Not a directory"):format(data), {
        save = data .. "/x",
      })
    end
  end)

  it("evaluates only with no steps", function()
    assert.is_truthy(run("sft", { max_steps = 0 }).output:find("held%-out after: "))
    local made = run_grpo({ max_steps = 0 })
    assert.same({}, made.phase("grpo"))
    assert.is_truthy(made.output:find("held%-out accuracy after: "))
  end)

  it("counts its steps by epochs where none are given", function()
    local made = run("sft", { num_train_epochs = 0.1, batch_size = 200, eval_rows = 10 })
    assert.equal(math.ceil(0.1 * #sums.new(0).train / 200), #made.metrics)
  end)

  it("ends where Ctrl-C cuts its rollouts, without training on them", function()
    count = count + 1
    local folder = ("%s/%d"):format(root, count)
    local output, status = start("grpo", with(GRPO, {
      out = folder, save = folder .. "/model",
      reward = write("interrupts.lua", [[
        local sent
        return function()
          if not sent then
            sent = io.popen("kill -INT $PPID"):close()
          end
          return 1
        end]]),
    }))
    assert.equal(130, status)
    for _, text in ipairs({
      "interrupted: ends after this step; again to stop at once",
      "accuracy before: interrupted sampled, interrupted greedy",
    }) do
      assert.is_truthy(output:find(text, 1, true), output)
    end
    for _, line in ipairs(lines_of(folder .. "/metrics.jsonl")) do
      assert.equal("warm-up", line.phase)
    end
    assert.is_true(helper.exists(folder .. "/model/config.json"))
  end)

  it("logs each reward, all tokens so far, and no entropy where nothing was trained on", function()
    local made = run_grpo({
      reward = "exact," .. write("half.lua", "return function() return 0.5 end"),
      reward_weights = "0,1", multi_objective_aggregation = "normalize_then_sum",
    })
    local lines, tokens = made.phase("grpo"), 0
    for _, line in ipairs(lines) do
      tokens = tokens + line.tokens
      assert.equal(tokens, line.num_tokens)
      assert.equal(0.5, line["rewards/half/mean"])
      assert.equal(0, line["rewards/half/std"])
      assert.equal("number", type(line["rewards/exact/mean"]))
    end
    local constant = run_grpo({ reward = root .. "/half.lua" }).phase("grpo")
    for _, line in ipairs(constant) do
      assert.equal(16, line.skipped)
      assert.is_nil(line.entropy)
      assert.is_nil(line["clip_ratio/low_mean"])
    end
  end)
end)

describe("the README", function()
  local blocks = {}
  for block in helper.read("README.md"):gmatch("```lua\n(.-)```") do
    blocks[#blocks + 1] = block
  end

  -- Runs a recipe's text; its metrics.
  local function run_text(text, ...)
    count = count + 1
    local folder = ("%s/%d"):format(root, count)
    local path = write(count .. ".lua", text)
    local line = "build/liger run %s --quiet --seed 1 --threads 1 --out %s %s 2>&1"
    local pipe = io.popen(line:format(path, folder, table.concat({ ... }, " ")))
    local output = pipe:read("*a")
    pipe:close()
    assert.equal(nil, output:match("liger: .*"))
    local lines = lines_of(folder .. "/metrics.jsonl")
    for _, values in ipairs(lines) do
      values.step_time, values.tokens_per_second = nil, nil
    end
    return lines
  end

  it("shows a recipe that runs, on data too", function()
    local lines = run_text(blocks[1], "--max-steps 3")
    assert.equal(3, #lines)
    assert.is_true(lines[3].loss < lines[1].loss)
    local model = root .. "/readme"
    run_grpo({ max_steps = 0, save = model })
    local data = write("readme.jsonl", ('{"prompt": "1+1=", "completion": "2"}\n'):rep(4))
    local more = run_text(blocks[1], "--max-steps 2", "--model", model, "--data", data)
    assert.equal(2, #more)
    assert.is_true(more[2].loss < more[1].loss)
  end)

  it("shows a loss that does what the recipe's does", function()
    local found
    for _, block in ipairs(blocks) do
      if block:find("return function(batch, logp, options)", 1, true) then
        local own = run_grpo({ loss = write("my_loss.lua", block) }).phase("grpo")
        local built_in = run_grpo().phase("grpo")
        for _, name in ipairs({ "reward", "loss", "grad_norm" }) do
          helper.close(column(own, name), column(built_in, name), 1e-4, name)
        end
        for _, line in ipairs(own) do
          assert.equal(0, line.skipped) -- what its gradient is nobody knows
          assert.equal("number", type(line["clip_ratio/low_mean"]))
        end
        found = true
      end
    end
    assert.is_true(found)
  end)

  it("shows a loss on a linear layer that a script can hold as it stands", function()
    for _, block in ipairs(blocks) do
      if block:find("linear_cross_entropy", 1, true) then
        local path = write("layer.lua", block
          .. 'print(hidden.grad.shape[2], weight.grad.shape[1], fn.sum(weight.grad):item() ~= 0)\n')
        local pipe = io.popen(("build/liger run %s 2>&1"):format(path))
        assert.equal("128\t256\ttrue\n", pipe:read("*a"))
        pipe:close()
        return
      end
    end
    error("it is not there")
  end)

  it("shows a reward that runs", function()
    local reward = assert(loadstring(blocks[2]))()
    assert.equal(1, reward("it is 95", { answer = "95" }))
    assert.equal(0, reward("it is 94", { answer = "95" }))
  end)
end)

describe("a loop of one's own", function()
  it("is a screen: its options, rollouts, a loss, an update, a log", function()
    local path = write("mine.lua", [[
      local config = liger.config { model = "", data = "", reward = "exact", group = 4, prompts = 4,
        micro_tokens = 60, max_completion_length = 5, temperature = 1, cache_bytes = 2 ^ 30 }
      local grpo, options, reward = liger.grpo, liger.grpo.options(), liger.reward(config.reward)
      local task = liger.task.prompts(config, reward)
      local model, run = task.model, liger.run(config)
      local rollouts, prompts = liger.rollouts(run, task, reward), liger.sampler.new(task.train, 1)
      local optimizer = liger.optim.adamw(model:parameters(), { lr = 1e-3 })

      local function loss(batch, logp)
        local ratio = (logp - batch.old_logp):exp()
        local clipped = ratio:clamp(1 - options.epsilon, 1 + options.epsilon_high)
        return -fn.minimum(ratio * batch.advantage, clipped * batch.advantage)
      end

      for step in run:steps(2) do
        local batch = rollouts:complete(prompts:next(config.prompts), { group = config.group })
        local advantages, metrics = liger.advantage(batch:rewards(), { group = config.group })
        batch:set_advantages(advantages)
        batch:set_weights(grpo.weights(batch:lengths(), options))
        for micro in batch:split(config.micro_tokens) do
          local logp = model:logprob(micro)
          fn.sum(loss(micro, logp) * micro.weight):backward()
        end
        metrics.grad_norm = optimizer:step()
        run:log(metrics)
      end
      run:finish()
    ]])
    count = count + 1
    local folder = ("%s/%d"):format(root, count)
    local line = "build/liger run %s --quiet --seed 1 --reward %s --out %s 2>&1"
    -- Untrained, it ends no answer early: the first byte earns something.
    local reward = write("byte.lua", "return function(text) return (text:byte() or 0) % 5 end")
    local pipe = io.popen(line:format(path, reward, folder))
    assert.equal("", pipe:read("*a"))
    pipe:close()
    local lines = lines_of(folder .. "/metrics.jsonl")
    assert.equal(2, #lines)
    assert.is_true(lines[2].grad_norm > 0 and lines[2].reward_std > 0)
  end)
end)

describe("the built-in sums", function()
  local function key(row)
    local a, b = row.prompt:match("^(%d+)%+(%d+)=$")
    a, b = tonumber(a), tonumber(b)
    return math.min(a, b) .. "+" .. math.max(a, b)
  end

  it("hold a tenth of the pairs out, in both orders", function()
    local t = sums.new(3)
    local held = {}
    for _, row in ipairs(t.held_out) do
      held[key(row)] = (held[key(row)] or 0) + 1
    end
    local pairs_held = 0
    for pair, times in pairs(held) do
      local a, b = pair:match("(%d+)%+(%d+)")
      assert.equal(a == b and 1 or 2, times)
      pairs_held = pairs_held + 1
    end
    assert.equal(409, pairs_held)
    for _, row in ipairs(t.train) do
      assert.is_nil(held[key(row)])
    end
    assert.equal(8100, #t.train + #t.held_out)
    local other = sums.new(4)
    assert.are_not.equal(
      t.held_out[1].prompt .. t.held_out[2].prompt,
      other.held_out[1].prompt .. other.held_out[2].prompt
    )
    assert.same(t.held_out[1], sums.new(3).held_out[1])
  end)

  it("are right, and their answers end with a newline", function()
    for _, row in ipairs(sums.new(1).train) do
      local a, b = row.prompt:match("^(%d%d)%+(%d%d)=$")
      assert.equal(a + b, tonumber(row.answer))
    end
    local row = sums.new(1).train[1]
    local bytes = sums.new(1).tokenizer
    assert.equal(row.prompt, bytes:decode(row.ids))
    assert.equal(row.answer .. "\n", bytes:decode(row.completion))
  end)

  it("of the held-out part occur in neither phase", function()
    local held = {}
    for _, row in ipairs(sums.new(1).held_out) do
      held[key(row)] = true
    end
    -- A reward that keeps the prompts it sees, in the order: warm-up tests, held-out, training,
    -- held-out.
    local seen = root .. "/seen"
    local reward = write("seen.lua", ([[
      return function(_, row, sample)
        local file = io.open(%q, "a")
        file:write(row.prompt, "\n")
        file:close()
        return 1 - #sample.completion / 5
      end]]):format(seen))
    run_grpo({ reward = reward, eval_rows = 1000 })
    local parts, in_held = {}, nil
    for prompt in io.lines(seen) do
      local now = held[key({ prompt = prompt })] or false
      if now ~= in_held then
        parts[#parts + 1] = { held = now, count = 0 }
        in_held = now
      end
      parts[#parts].count = parts[#parts].count + 1
    end
    -- A held-out problem in a training phase would cut it in two.
    assert.same({ false, true, false, true }, column(parts, "held"))
    assert.equal(256, parts[1].count)
    assert.equal(3 * 4 * 4, parts[3].count)
    local evaluated = 3 * #sums.new(1).held_out
    assert.equal(evaluated, parts[2].count)
    assert.equal(evaluated, parts[4].count)
  end)
end)

describe("a recipe's task", function()
  it("takes model and data together, with a tokenizer", function()
    local folder = helper.golden_folder("models/llama3")
    for _, kind in ipairs({ "prompts", "supervised" }) do
      local _, problem = pcall(task[kind], { model = "m", data = "" })
      assert.same({
        message = "--model without --data: wanted a file of rows beside the checkpoint", code = 2,
      }, problem)
      _, problem = pcall(task[kind], { model = "", data = "d" })
      assert.same({ message = data_alone, code = 2 }, problem)
      helper.raises(function()
        task[kind]({ model = folder, data = "d", dtype = "f32" })
      end, folder .. ": there is no tokenizer.json, wanted one beside the model")
    end
  end)

  it("is the built-in one without both", function()
    local built = task.prompts({ model = "", data = "", seed = 1, dtype = "f32", eval_rows = 9 })
    assert.is_true(built.built_in)
    assert.equal(9, #built.held_out)
    assert.same({ 10 }, built.model.stop_ids)
    assert.equal("accuracy", built.metric)
    assert.equal(426688, built.model:num_parameters())
  end)
end)
