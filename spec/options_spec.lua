-- Options that the others leave without effect, in each loss and recipe, and a range's kinds.
local helper = require("spec.helper")
local config = require("liger.train.config")
local options = require("liger.options")

local own = function() end

-- Loss, option, a value it may have; what else is said where it has no effect, and where it has.
local CASES = {
  { "dpo", "label_smoothing", 0.1, { loss_type = "hinge" }, { loss_type = "hinge,robust" } },
  { "dpo", "label_smoothing", 0, { loss_type = "hinge" }, {} }, -- its default is given too
  { "dpo", "label_smoothing", 0.1, { loss_type = "ipo,sft" }, { loss_type = "aot_unpaired" } },
  { "dpo", "f_divergence_type", "forward_kl", { loss_type = "bco_pair" }, { loss_type = "ipo" } },
  { "dpo", "f_divergence_type", "forward_kl", { loss_type = "sft" }, { loss_type = "sft,hinge" } },
  { "dpo", "f_alpha_divergence_coef", 0.3, {}, { f_divergence_type = "alpha_divergence" } },
  { "dpo", "discopop_tau", 0.1, {}, { loss_type = "discopop" } },
  { "dpo", "discopop_tau", 0.1, { loss_type = "sft,ipo" }, { loss_type = { "sft", "discopop" } } },
  { "cpo", "alpha", 0.5, {}, { loss_type = "simpo" } },
  { "cpo", "alpha", 0.5, { loss_type = "ipo" }, { loss_type = "simpo" } },
  { "cpo", "simpo_gamma", 1, { loss_type = "hinge" }, { loss_type = "simpo" } },
  { "cpo", "label_smoothing", 0.1, { loss_type = "hinge" }, { loss_type = "simpo" } },
  { "cpo", "label_smoothing", 0.1, { loss_type = "ipo" }, {} },
  { "grpo", "epsilon", 0.1, { loss_type = "cispo" }, { loss_type = "grpo" } },
  { "grpo", "epsilon", 0.2, { loss_type = "sapo" }, { loss_type = "sapo", loss = own } },
  { "grpo", "epsilon_high", 0.1, { loss_type = "vespo" }, { loss_type = "cispo" } },
  { "grpo", "delta", 2, { loss_type = "cispo" }, { loss_type = "luspo" } },
  { "grpo", "delta", 2, { loss_type = "vespo" }, {} },
  { "grpo", "use_bias_correction_kl", false, {}, { beta = 0.1 } },
  { "grpo", "importance_sampling_level", "sequence", { loss_type = "vespo" }, {} },
  { "grpo", "importance_sampling_level", "token", { loss_type = "vespo" },
    { loss_type = "vespo", beta = 0.1 } },
  { "grpo", "sampler_clip_min", 0.1, {}, { sampler_mode = "token_mask" } },
  { "grpo", "sampler_clip_max", 3, {}, { sampler_mode = "sequence_truncate" } },
  { "grpo", "sapo_temperature_pos", 2, {}, { loss_type = "sapo" } },
  { "grpo", "sapo_temperature_neg", 2, { loss_type = "cispo" }, { loss = own } },
  { "grpo", "vespo_k_pos", 1, {}, { loss_type = "vespo" } },
  { "grpo", "vespo_k_neg", 1, { loss_type = "grpo" }, { loss_type = "vespo" } },
  { "grpo", "vespo_lambda_pos", 1, {}, { loss_type = "vespo" } },
  { "grpo", "vespo_lambda_neg", 1, { loss_type = "sapo" }, { loss_type = "vespo" } },
  { "grpo", "num_items_in_batch", 9, { loss_type = "grpo" }, { loss_type = "vespo" } },
  { "distill", "beta", 0.1, { loss_type = "tvd" }, { loss_type = "jsd" } },
  { "distill", "beta", 0.5, {}, { loss_type = "jsd" } },
}

-- Recipe, option, its text; the words beside it where it has no effect, and where it has.
local DATA = "--model m --data d"
local LINES = {
  { "dpo", "discopop-tau", "0.1", "", "--loss-type discopop" },
  { "dpo", "discopop-tau", "0.05", "--loss-type sft,ipo", "--loss-type sft,discopop" },
  { "dpo", "precompute-ref-log-probs", "true", "--reference-free", "" },
  { "cpo", "alpha", "0.1", "", "--loss-type simpo" },
  { "grpo", "delta", "4", "--loss-type cispo", "" },
  { "grpo", "epsilon", "0.2", "--loss-type cispo", "" },
  { "grpo", "sapo-temperature-pos", "1", "", "--loss-type sapo" },
  { "grpo", "sampler-clip-max", "3", "", "--sampler-mode token_mask" },
  { "grpo", "use-bias-correction-kl", "true", "", "--beta 0.1" },
  { "grpo", "scale-rewards", "batch", "--multi-objective-aggregation normalize_then_sum", "" },
  { "grpo", "sft-until", "0.3", DATA, "" },
  { "distill", "beta", "0.5", "--loss-type tvd", "--loss-type jsd" },
  { "distill", "temperature", "0.9", DATA .. " --lmbda 0", DATA },
  { "distill", "temperature", "0.9", DATA .. " --teacher-logprobs f", DATA .. " --lmbda 1" },
  { "distill", "weight-hard", "1", "--lmbda 1", "--lmbda 0.9" },
  { "distill", "max-completion-length", "9", DATA .. " --lmbda 0", "--lmbda 0" },
  { "distill", "teacher-until", "0.5", DATA, "" },
}
for _, name in ipairs({ "sft", "distill", "dpo", "orpo", "cpo", "kto", "grpo" }) do
  LINES[#LINES + 1] = { name, "holdout", "0.1", "", DATA }
  LINES[#LINES + 1] = { name, "optim", "adamw_bf16", "", "--dtype bf16" }
  LINES[#LINES + 1] = { name, "optim", "adamw_bf16", "--dtype f32", "--dtype bf16" }
  if name ~= "grpo" then
    LINES[#LINES + 1] = { name, "max-length", "1024", "", DATA }
  end
  if name ~= "sft" and name ~= "distill" then
    LINES[#LINES + 1] = { name, "sft-learning-rate", "1e-3", DATA, "" }
    LINES[#LINES + 1] = { name, "sft-until", "0.5", DATA, "" }
  end
end

local function with(name, value, beside)
  local o = { [name] = value }
  for key, other in pairs(beside) do
    o[key] = other
  end
  return o
end

-- The error that a recipe ends with before it opens its task; nil: it comes as far as that.
local function refusal(recipe, ...)
  local args = {}
  for word in table.concat({ ... }, " "):gmatch("%S+") do
    args[#args + 1] = word
  end
  config.set_command({ recipe = recipe, args = args, text = "" })
  local task = require("liger.train.task")
  local saved = {}
  for _, name in ipairs({ "supervised", "distill", "prompts", "preference" }) do
    saved[name], task[name] = task[name], function() error("task", 0) end
  end
  local _, problem = pcall(loadfile(("recipes/%s.lua"):format(recipe)))
  for name, f in pairs(saved) do
    task[name] = f
  end
  config.set_command(nil)
  return problem ~= "task" and problem or nil
end

describe("a loss's option", function()
  it("is refused where the others leave it without effect, and taken where they do not", function()
    for _, case in ipairs(CASES) do
      local loss, name, value, unread, read = unpack(case)
      local module = require("liger.loss." .. loss)
      helper.raises(function()
        module.options(with(name, value, unread))
      end, ("%s: %s is %s, which counts only "):format(loss, name, tostring(value)))
      module.options(with(name, value, read))
    end
  end)

  it("has a message that says what was chosen and when it counts", function()
    local dpo, grpo = require("liger.loss.dpo"), require("liger.loss.grpo")
    helper.raises(function()
      dpo.options({ discopop_tau = 0.1, loss_type = "sft,ipo" })
    end, "dpo: discopop_tau is 0.1, which counts only with loss_type discopop: loss_type is "
      .. "sft,ipo")
    helper.raises(function()
      grpo.options({ sampler_clip_max = 3 })
    end, "grpo: sampler_clip_max is 3, which counts only with sampler_mode: sampler_mode is none")
    helper.raises(function()
      grpo.options({ use_bias_correction_kl = true })
    end, "grpo: use_bias_correction_kl is true, which counts only with beta above 0: beta is 0")
    helper.raises(function()
      grpo.options({ delta = 2, loss_type = "sapo" })
    end, "grpo: delta is 2, which counts only with loss_type grpo, bnpo, dapo, dr_grpo or luspo or "
      .. "with loss: loss_type is sapo and loss is none")
  end)

  it("that is off is no option given", function()
    require("liger.loss.grpo").options({ loss_type = "cispo", delta = false })
  end)
end)

describe("a recipe's option", function()
  it("is refused on the command line where it has no effect, its default too", function()
    for _, case in ipairs(LINES) do
      local recipe, name, value, unread, read = unpack(case)
      local words = ("--%s=%s"):format(name, value)
      local text = recipe .. " " .. words .. " " .. unread
      local problem = refusal(recipe, words, unread)
      assert.equal(2, type(problem) == "table" and problem.code, text .. tostring(problem))
      local start = ("--%s is "):format((name:gsub("-", "_")))
      assert.equal(start, problem.message:sub(1, #start), text)
      assert.is_nil(refusal(recipe, words, read), text)
    end
  end)

  it("has a message that says what was chosen and when it counts", function()
    assert.equal(
      "--holdout is 0.2, which counts only with data: data is none",
      refusal("sft", "--holdout 0.2").message
    )
    assert.equal(
      "--optim is adamw_bf16, which counts only with dtype bf16: dtype is f32",
      refusal("grpo", "--optimizer adamw_bf16").message
    )
    assert.is_nil(refusal("grpo", "--optim adamw"))
    assert.equal(
      "--sft_until is 0.2, which counts only without data: data is d",
      refusal("orpo", DATA, "--sft-until 0.2").message
    )
  end)
end)

describe("options.over", function()
  local ranges = { list = { kind = "table", wanted = "a list of ids" }, x = { min = 0 } }
  local function over(given)
    return options.over("op", { list = false, x = 1 }, ranges, given)
  end

  it("takes tables and functions where a range says so", function()
    local list = {}
    assert.equal(list, over({ list = list }).list)
    assert.equal(false, over({ list = false }).list)
    helper.raises(function()
      over({ list = 3 })
    end, "op: list is 3, wanted a list of ids")
  end)

  it("refuses what is not finite", function()
    for _, value in ipairs({ math.huge, 0 / 0 }) do
      helper.raises(function()
        over({ x = value })
      end, "op: x is ")
    end
  end)
end)
