-- GRPO. Without arguments: a small model learns sums of two-digit numbers, first by SFT until it
-- half-knows them, then by trial and reward. With --model and --data: that checkpoint on those
-- prompts.
local liger = require("liger")
local grpo = liger.grpo

local count = { min = 1, whole = true }
local config = liger.config({
  model = "", -- a Hugging Face folder or a GGUF file; empty: a small model, warmed up here
  data = "", -- JSONL with `prompt` or `messages`, and `answer`; empty: sums of two-digit numbers
  reward = "exact", -- exact, numeric, a Lua file that returns function(completion, row), or a,b,...
  reward_weights = "", -- a number for each reward, as 1,0.5; empty: 1 each
  holdout = 0.1, -- share of the data that is only evaluated on
  eval_rows = 1000, -- rows of it at most
  max_steps = 750,
  prompts_per_step = 32, -- of all processes
  num_generations = 8, -- completions a prompt
  max_completion_length = false, -- tokens; default 5 for sums, 512 for data
  learning_rate = false, -- default 4e-4 for sums, 1e-6 for data
  lr_scheduler_type = false, -- default wsd (constant, then falling) for sums, linear for data
  warmup_steps = false, -- default 20 for sums, 0 for data
  optim = "adamw", -- or adamw_bf16: of bf16 weights, states in bf16 too (10 bytes a weight, not 16)
  weight_decay = 0,
  max_grad_norm = 1, -- 0: no clipping
  num_iterations = 1, -- updates a batch of completions
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit
  cache_bytes = false, -- of keys and values at most; default 1 GiB, on a GPU half of what is free
  temperature = 1,
  top_k = 0, -- 0: off
  top_p = 1,
  min_p = 0,
  loss = "", -- a Lua file that returns function(batch, logp, options): a policy term of one's own
  loss_type = "dapo", -- grpo, bnpo, dapo, dr_grpo, luspo, cispo, sapo or vespo
  epsilon = 0.2,
  epsilon_high = false, -- number or none: epsilon; of cispo the bound itself
  delta = false, -- number or none: cap of the ratio
  beta = 0, -- weight of the KL term to the model at the start
  use_bias_correction_kl = true,
  importance_sampling_level = "token", -- token, or sequence (GSPO)
  off_policy_mask_threshold = false, -- number or none: drift that leaves out a sequence of A < 0
  top_entropy_quantile = 1, -- share of tokens, those of the highest entropy, with a policy term
  entropy_coef = 0, -- weight of the mean entropy, which is taken off the loss
  sampler_mode = false, -- token_truncate, token_mask, sequence_truncate or sequence_mask: the
                        -- ratio of the training forward to the sampler as a factor
  sampler_clip_min = false, -- number or none: bounds of that ratio
  sampler_clip_max = 3,
  sapo_temperature_pos = 1, -- of sapo, where A > 0
  sapo_temperature_neg = 1.05,
  vespo_k_pos = 2, vespo_lambda_pos = 3, -- k and lambda of vespo, where A >= 0
  vespo_k_neg = 3, vespo_lambda_neg = 2, -- where A < 0
  scale_rewards = "group", -- group, batch or none
  multi_objective_aggregation = "sum_then_normalize", -- or normalize_then_sum, of several rewards
  mask_truncated_completions = false,
  sft_learning_rate = 1e-3, -- of the small model's warm-up, 128 problems a step
  sft_until = 0.3, -- share of right sampled answers that ends the warm-up
  save = "", -- folder for the trained model
}, liger.merge(liger.ranges.training, liger.ranges.warm_up, grpo.ranges, {
  prompts_per_step = count, num_generations = { min = 2, whole = true }, num_iterations = count,
  cache_bytes = count, temperature = { above = 0 }, top_k = { min = 0, whole = true },
  top_p = { above = 0, max = 1 }, min_p = { min = 0, max = 1 },
  multi_objective_aggregation = { "sum_then_normalize", "normalize_then_sum" },
  scale_rewards = {
    "group", "batch", "none", with = { "multi_objective_aggregation", "sum_then_normalize" },
  },
}))
liger.fill(config, config.data == "" and {
  max_completion_length = 5, learning_rate = 4e-4, lr_scheduler_type = "wsd", warmup_steps = 20,
} or {
  max_completion_length = 512, learning_rate = 1e-6, lr_scheduler_type = "linear", warmup_steps = 0,
})
local options = grpo.options(liger.pick(config, grpo.defaults))
local reward = liger.reward(config.reward, config.reward_weights)
local task = liger.task.prompts(config, reward)
local model, run = task.model, liger.run(config)
run:watch(model:parameters())
local rollouts = liger.rollouts(run, task, reward)

if task.built_in then
  rollouts:warm_up(config.sft_learning_rate, config.sft_until)
end
local before = run:once("before", function() return rollouts:evaluate() end)

local reference = config.beta > 0 and model:copy()
local optimizer, rate = liger.optimizer(model, config, { decay_type = "linear" })
local prompts = liger.sampler.new(task.train, config.seed + 2)

local function logprob(batch)
  return model:logprob(batch, { temperature = config.temperature })
end

run:keep({ model = model, optimizer = optimizer, prompts = prompts, rollouts = rollouts })
for step in run:steps(config.max_steps, { label = "grpo" }) do
  local batch = rollouts:complete(prompts:next(config.prompts_per_step), {
    group = config.num_generations, top_k = config.top_k, top_p = config.top_p,
    min_p = config.min_p,
  })
  if not batch then
    break -- Ctrl-C
  end
  local advantages, metrics = liger.advantage(batch:rewards(), {
    group = config.num_generations, scale_rewards = config.scale_rewards, names = reward.names,
    reward_weights = reward.weights,
    multi_objective_aggregation = config.multi_objective_aggregation,
  })
  batch:set_advantages(advantages)
  if config.mask_truncated_completions then
    batch:mask_truncated()
  end
  batch:set_weights(grpo.weights(batch:lengths(), options))
  if options.sampler_mode then
    batch:set_old(model, { temperature = config.temperature })
    metrics = liger.merge(metrics, grpo.sampler_ratios(batch.samples, options))
  end
  if reference then
    batch:set_reference(reference, { temperature = config.temperature })
  end
  local parts, grad_norm
  for _ = 1, config.num_iterations do
    local of_batch = grpo.whole(batch, options, config.micro_tokens, logprob)
    parts = {}
    for micro in batch:split(config.micro_tokens, grpo.keeps_all(options)) do
      local logp, entropy = logprob(micro)
      local loss, part = grpo.loss(micro, logp, entropy, options, of_batch)
      loss:backward()
      parts[#parts + 1] = part
    end
    grad_norm = optimizer:step(rate(step - 1))
  end
  run:log(liger.merge(metrics, batch:metrics(), grpo.metrics(parts, options), {
    grad_norm = grad_norm, learning_rate = rate(step - 1),
    tokens = batch.num_tokens, skipped = batch.num_skipped, epoch = prompts:epochs(),
  }))
  local sample = batch.samples[1]
  run:sample({ prompt = sample.row.prompt, completion = sample.text, reward = sample.reward })
end

run:save(model, task.tokenizer)
local after = rollouts:evaluate()
run:print(("held-out %s before: %s"):format(task.metric, before))
run:print(("held-out %s after: %s"):format(task.metric, after))
run:finish()
