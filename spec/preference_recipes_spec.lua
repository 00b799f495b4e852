-- The preference recipes as they are run: small, with a fixed seed, through the program.
local helper = require("spec.helper")
local cjson = require("cjson")
local config = require("liger.train.config")
local recipes = require("spec.recipe")

local column, finite, run, with = recipes.column, recipes.finite, recipes.run, recipes.with
local root

setup(function()
  root = recipes.open()
end)

teardown(recipes.close)

local SMALL = {
  max_steps = 3, batch_size = 6, sft_until = 0, seed = 1, threads = 1, warmup_steps = 0,
  eval_rows = 20,
}

local NAMES = { "dpo", "orpo", "kto", "cpo" }

local function small(name, options)
  local made = run(name, with(SMALL, options or {}))
  finite(made)
  return made, made.phase(name)
end

-- A model of the sums and a file of pairs.
local function checkpoint()
  local model = root .. "/model"
  if not helper.exists(model .. "/config.json") then
    small("cpo", { max_steps = 0, save = model })
  end
  local lines = {}
  for i = 1, 12 do
    lines[i] = ('{"prompt": "%d+1=", "chosen": "%d\\n", "rejected": "%d\\n"}'):format(
      i + 10, i + 11, i % 3 == 0 and 5 or 30 + i
    )
  end
  return {
    model = model, data = recipes.write("pairs.jsonl", table.concat(lines, "\n")), threads = 1,
    max_steps = 3, batch_size = 4, holdout = 0.25, learning_rate = 1e-3,
  }
end

describe("a preference recipe", function()
  it("has its recorded losses", function()
    for name, losses in pairs({
      dpo = { 0.693147182, 0.657536685, 0.777813435 }, kto = { 0.5, 0.454020977, 0.426257372 },
      orpo = { 4.46073484, 4.35080004, 4.20221519 }, cpo = { 3.9420445, 4.05018663, 3.56561279 },
    }) do
      helper.close(column(select(2, small(name)), "loss"), losses, 1e-5, name)
    end
  end)

  it("gives the same lines for the same seed, on any number of threads", function()
    for _, name in ipairs({ "dpo", "kto" }) do
      local first = small(name).metrics
      assert.same(first, small(name, { threads = 2 }).metrics)
      assert.are_not.same(first, small(name, { seed = 2 }).metrics)
    end
  end)

  it("changes next to nothing by smaller micro-batches", function()
    for _, name in ipairs(NAMES) do
      local _, plain = small(name)
      local _, split = small(name, { micro_tokens = 20 })
      for key, value in pairs(plain[1]) do
        if type(value) == "number" then
          helper.close(split[1][key], value, 1e-5, name .. " " .. key)
        end
      end
      helper.close(column(split, "loss"), column(plain, "loss"), 1e-4, name)
    end
    -- The whole batch at once, whatever the limit is.
    assert.same(small("dpo", { loss_type = "aot" }).metrics,
      small("dpo", { loss_type = "aot", micro_tokens = 20 }).metrics)
  end)

  it("has TRL's metrics", function()
    local pair = {
      "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
      "logps/rejected", "logits/chosen", "logits/rejected", "mean_token_accuracy",
    }
    for name, list in pairs({
      dpo = { "entropy" }, orpo = { "nll_loss", "log_odds_ratio", "log_odds_chosen" },
      cpo = { "nll_loss" }, kto = { "entropy", "kl" },
    }) do
      local _, lines = small(name)
      for _, key in ipairs({ "loss", "grad_norm", "learning_rate", "num_tokens", unpack(list) }) do
        assert.equal("number", type(lines[1][key]), key)
      end
      for _, key in ipairs(pair) do
        local is_number = type(lines[1][key]) == "number"
        assert.equal(name ~= "kto" or key ~= "rewards/accuracies", is_number, key)
      end
    end
  end)

  it("starts at the reference: rewards of 0 and the loss of no preference", function()
    local line = select(2, small("dpo"))[1]
    assert.equal(0, line["rewards/chosen"])
    assert.equal(0, line["rewards/margins"])
    helper.close(line.loss, math.log(2), 1e-6)
    line = select(2, small("kto"))[1]
    assert.equal(0, line.kl)
    assert.equal(0.5, line.loss)
  end)

  it("takes the reference's log-probabilities once or as it goes, with the same bits", function()
    for _, name in ipairs({ "dpo", "kto" }) do
      local options = with(checkpoint(), { max_steps = 5 })
      for _, o in ipairs({ {}, name == "dpo" and { ld_alpha = 0.5 } or { max_length = 8 } }) do
        local plain = run(name, with(options, o))
        local given = run(name, with(options, o, { precompute_ref_log_probs = true }))
        assert.same(plain.metrics, given.metrics)
        assert.equal(plain.output, given.output)
        assert.are_not.equal(plain.metrics[1].loss, plain.metrics[5].loss)
      end
    end
  end)

  it("runs with each of its methods", function()
    for name, list in pairs({
      dpo = {
        { loss_type = "hinge" }, { loss_type = "sigmoid,sft", loss_weights = "1,0.5" },
        { label_smoothing = 0.1 }, { f_divergence_type = "js_divergence" }, { ld_alpha = 0.5 },
        { use_weighting = true }, { reference_free = true }, { dtype = "bf16" },
        { gradient_checkpointing = true, lr_scheduler_type = "cosine" },
      },
      cpo = {
        { loss_type = "simpo", cpo_alpha = 0 }, { loss_type = "simpo", alpha = 0.2 },
        { loss_type = "ipo" }, { loss_type = "hinge" }, { label_smoothing = 0.1 },
      },
      kto = {
        { loss_type = "apo_zero_unpaired", beta = 0.3 },
        { desirable_weight = 1.3, undesirable_weight = 0.5 },
      },
      orpo = { { beta = 0.5 } },
    }) do
      local options = checkpoint()
      local plain = run(name, options)
      for _, o in ipairs(list) do
        local made, text = run(name, with(options, o)), name .. " " .. cjson.encode(o)
        finite(made)
        assert.equal(3, #made.metrics, text)
        assert.is_true(made.metrics[3].grad_norm > 0, text)
        assert.are_not.same(plain.metrics, made.metrics, text)
      end
    end
  end)

  it("learns a file's preferences", function()
    for _, name in ipairs(NAMES) do
      local made = run(name, with(checkpoint(), { max_steps = 12 }))
      local before = made.output:match("held%-out answers before: (%d+%.%d+) loss, ")
      local after = made.output:match("held%-out answers after: (%d+%.%d+) loss, ")
      assert.is_true(tonumber(after) < tonumber(before), made.output)
      assert.same({}, made.phase("warm-up"))
    end
  end)

  it("says how often held-out problems were solved before and after", function()
    for _, name in ipairs(NAMES) do
      local made = small(name)
      for _, when in ipairs({ "before", "after" }) do
        local form = "held%-out accuracy " .. when .. ": %d+%.%d%d sampled, %d+%.%d%d greedy\n"
        assert.is_truthy(made.output:find(form), made.output)
      end
    end
  end)

  it("counts its steps by epochs where none are given", function()
    local options = with(checkpoint(), { max_steps = "none", num_train_epochs = 2 })
    -- 9 of 12 pairs are trained on.
    assert.equal(5, #run("orpo", options).metrics)
  end)

  it("B104: refuses values out of range before it makes anything", function()
    local common = {
      holdout = { "0" }, eval_rows = { "0" }, max_length = { "0" }, num_train_epochs = { "0" },
      max_steps = { "-1" }, batch_size = { "0" }, micro_tokens = { "-1" },
      learning_rate = { "-1" }, lr_scheduler_type = { "triangle" }, warmup_steps = { "-1" },
      weight_decay = { "-1" }, max_grad_norm = { "-1" }, sft_learning_rate = { "-1" },
      sft_until = { "2" },
    }
    local own = {
      dpo = {
        beta = { "0" }, label_smoothing = { "0.7" }, f_divergence_type = { "kl" },
        ld_alpha = { "-1" }, discopop_tau = { "0" },
      },
      orpo = { beta = { "-1" } },
      kto = { beta = { "0" }, loss_type = { "sigmoid" }, desirable_weight = { "-1" } },
      cpo = { loss_type = { "kto" }, cpo_alpha = { "-1" }, simpo_gamma = { "-1" } },
    }
    local function refused(name, key, value)
      config.set_command({
        recipe = name, args = { "--" .. key, value, "--out", root .. "/refused" }, text = "",
      })
      local ok, problem = pcall(loadfile(("recipes/%s.lua"):format(name)))
      config.set_command(nil)
      assert.is_false(ok)
      return problem
    end
    for name, lists in pairs(own) do
      for key, values in pairs(with(common, lists)) do
        for _, value in ipairs(values) do
          local problem = refused(name, key, value)
          assert.equal(2, type(problem) == "table" and problem.code, key)
          local wanted = ("got %q, wanted "):format(value)
          assert.is_truthy(problem.message:find(wanted, 1, true), problem.message)
        end
      end
    end
    assert.is_truthy(refused("dpo", "loss_type", "kto_pair"):find("dpo: loss_type is kto_pair", 1,
      true))
    assert.is_false(helper.exists(root .. "/refused"))
  end)
end)
