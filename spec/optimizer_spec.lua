-- The optimiser that a recipe's options ask for.
local liger = require("liger")
local helper = require("spec.helper")
local optimizer = require("liger.train.optimizer")
local recipes = require("spec.recipe")
local sums = require("liger.data.sums")

setup(recipes.open)
teardown(recipes.close)

local CONFIG = {
  learning_rate = 1e-3, lr_scheduler_type = "wsd", max_steps = 10, warmup_steps = 2, seed = 5,
  weight_decay = 0.1, max_grad_norm = 2, optim = "adamw",
}

local function made(dtype, optim)
  local model = liger.from_config(sums.config, { dtype = dtype }):init(1, sums.init_std)
  return optimizer.new(model, recipes.with(CONFIG, { optim = optim }), { decay_type = "linear" })
end

describe("a recipe's optimiser", function()
  it("has the options and the schedule of the recipe", function()
    local o, rate = made("f32", "adamw")
    assert.same({ 0.1, 2, 5 }, { o.weight_decay, o.max_grad_norm, o.seed })
    helper.close({ rate(0), rate(1), rate(6), rate(8) }, { 0, 5e-4, 1e-3, 1e-3 * 2 / 3 }, 1e-9)
  end)

  it("has states of the dtype that optim says", function()
    for _, case in ipairs({
      { "f32", "adamw", "f32" }, { "bf16", "adamw", "f32" }, { "bf16", "adamw_bf16", "bf16" },
    }) do
      for _, state in ipairs(made(case[1], case[2]).states) do
        assert.equal(case[3], state.m.dtype)
        assert.equal(case[3], state.v.dtype)
        assert.equal(case[1] == "bf16" and case[2] == "adamw", state.low ~= nil)
      end
    end
  end)

  it("with bf16 states trains in every recipe, by the seed", function()
    local small = {
      max_steps = 3, seed = 1, threads = 1, warmup_steps = 0, eval_rows = 20, dtype = "bf16",
      learning_rate = 1e-3,
    }
    for _, name in ipairs({ "sft", "distill", "dpo", "orpo", "cpo", "kto", "grpo" }) do
      local o = recipes.with(small, name == "distill" and { teacher_until = 0 }
        or name ~= "sft" and { sft_until = 0 } or {}, name == "grpo"
        and { prompts_per_step = 4, entropy_coef = 0.1 } -- its rewards are all 0
        or { batch_size = 6 })
      local plain = recipes.run(name, o)
      local first = recipes.run(name, recipes.with(o, { optim = "adamw_bf16" }))
      recipes.finite(first)
      assert.equal(#plain.metrics, #first.metrics)
      assert.are_not.same(plain.metrics, first.metrics, name)
      assert.same(first.metrics,
        recipes.run(name, recipes.with(o, { optim = "adamw_bf16", threads = 2 })).metrics)
      -- The first step's losses are of the same weights.
      local a, b = plain.phase(name)[1], first.phase(name)[1]
      assert.equal(a.loss, b.loss, name)
    end
  end)
end)
