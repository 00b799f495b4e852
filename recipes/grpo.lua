-- GRPO. Without arguments: a small model learns sums of two-digit numbers, first by SFT until it
-- half-knows them, then by trial and reward. With --model and --data: that checkpoint on those
-- prompts.
local liger = require("liger")
local fn, grpo = liger.fn, liger.grpo

local count, whole, positive = { min = 1, whole = true }, { min = 0, whole = true }, { above = 0 }
local from_0, share = { min = 0 }, { min = 0, max = 1 }
local config = liger.config({
  model = "", -- a Hugging Face folder or a GGUF file; empty: a small model, warmed up here
  data = "", -- JSONL with `prompt` or `messages`, and `answer`; empty: sums of two-digit numbers
  reward = "exact", -- exact, numeric, a Lua file that returns function(completion, row), or a,b,...
  reward_weights = "", -- a number for each reward, as 1,0.5; empty: 1 each
  holdout = 0.1, -- share of the data that is only evaluated on
  eval_rows = 1000, -- rows of it at most
  max_steps = 750,
  prompts_per_step = 32,
  num_generations = 8, -- completions a prompt
  max_completion_length = false, -- tokens; default 5 for sums, 512 for data
  learning_rate = false, -- default 4e-4 for sums, 1e-6 for data
  lr_scheduler_type = false, -- default wsd (constant, then falling) for sums, linear for data
  warmup_steps = false, -- default 20 for sums, 0 for data
  weight_decay = 0,
  max_grad_norm = 1, -- 0: no clipping
  num_iterations = 1, -- updates a batch of completions
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit
  cache_bytes = 2 ^ 30, -- of the completions' keys and values at most
  temperature = 1,
  top_k = 0, -- 0: off
  top_p = 1,
  min_p = 0,
  loss_type = "dapo", -- grpo, bnpo, dapo or dr_grpo
  epsilon = 0.2,
  epsilon_high = false, -- number or none: epsilon
  delta = false, -- number or none: cap of the ratio
  beta = 0, -- weight of the KL term to the model at the start
  use_bias_correction_kl = true,
  importance_sampling_level = "token", -- token, or sequence (GSPO)
  scale_rewards = "group", -- group, batch or none
  multi_objective_aggregation = "sum_then_normalize", -- or normalize_then_sum, of several rewards
  mask_truncated_completions = false,
  sft_learning_rate = 1e-3, -- of the small model's warm-up, 128 problems a step
  sft_until = 0.3, -- share of right sampled answers that ends the warm-up
  save = "", -- folder for the trained model
}, {
  holdout = { above = 0, max = 0.9 }, eval_rows = count, max_steps = whole,
  prompts_per_step = count, num_generations = { min = 2, whole = true },
  max_completion_length = count, learning_rate = from_0, warmup_steps = from_0,
  lr_scheduler_type = { "constant", "linear", "cosine", "wsd" }, weight_decay = from_0,
  max_grad_norm = from_0, num_iterations = count, micro_tokens = whole, cache_bytes = count,
  temperature = positive, top_k = whole, top_p = { above = 0, max = 1 }, min_p = share,
  loss_type = { "grpo", "bnpo", "dapo", "dr_grpo" }, epsilon = from_0, epsilon_high = from_0,
  delta = positive, beta = from_0, importance_sampling_level = { "token", "sequence" },
  scale_rewards = { "group", "batch", "none" }, sft_learning_rate = from_0, sft_until = share,
  multi_objective_aggregation = { "sum_then_normalize", "normalize_then_sum" },
})
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

-- Warm-up: cross entropy on answers, until sampled answers to training problems are right often
-- enough for rewards to differ.
if task.built_in then
  local optimizer = liger.optim.adamw(model:parameters(), { lr = config.sft_learning_rate })
  local rows = liger.sampler.new(task.train, config.seed)
  local tests = liger.sampler.new(task.train, config.seed + 1)
  for step in run:steps(1000, { label = "warm-up" }) do
    local batch = liger.pack.completions(rows:next(128))
    local loss = model:cross_entropy(batch, 1 / batch.num_completion)
    loss:backward()
    local grad_norm = optimizer:step(config.sft_learning_rate * math.min(1, step / 20))
    local accuracy = step % 10 == 0 and select(2, rollouts:complete(tests:next(256))) or nil
    run:log({ loss = loss, grad_norm = grad_norm, accuracy = accuracy, tokens = batch.num_tokens })
    if accuracy and accuracy >= config.sft_until then
      run:stop()
    end
  end
end
local before = rollouts:evaluate()

local reference = config.beta > 0 and model:copy()
local optimizer = liger.optim.adamw(model:parameters(), {
  lr = config.learning_rate, weight_decay = config.weight_decay,
  max_grad_norm = config.max_grad_norm,
})
local rate = liger.optim.schedule(config.lr_scheduler_type, {
  lr = config.learning_rate, steps = config.max_steps, warmup = config.warmup_steps,
  decay_type = "linear", decay_steps = math.floor(0.3 * config.max_steps),
})
local prompts, num_tokens = liger.sampler.new(task.train, config.seed + 2), 0

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
  if reference then
    batch:set_reference(reference, { temperature = config.temperature })
  end
  local loss_sum, sums, grad_norm
  for _ = 1, config.num_iterations do
    loss_sum, sums = 0, nil
    for micro in batch:split(config.micro_tokens, config.beta > 0) do
      local logp, entropy = model:logprob(micro, { temperature = config.temperature })
      local token_loss, parts = grpo.token_loss(micro, logp, options)
      local loss = fn.masked_sum(token_loss * micro.weight, micro.mask)
      loss:backward()
      loss_sum = loss_sum + loss:item()
      sums = grpo.sums(micro, entropy, parts, options, sums)
    end
    run:check({ loss = loss_sum })
    grad_norm = optimizer:step(rate(step - 1))
  end
  num_tokens = num_tokens + batch.num_tokens
  run:log(liger.merge(metrics, batch:metrics(), grpo.metrics(sums, options), {
    loss = loss_sum, grad_norm = grad_norm, learning_rate = rate(step - 1),
    tokens = batch.num_tokens, num_tokens = num_tokens, skipped = batch.num_skipped,
    epoch = prompts:epochs(),
  }))
  local sample = batch.samples[1]
  run:sample({ prompt = sample.row.prompt, completion = sample.text, reward = sample.reward })
end

run:save(model, task.tokenizer)
local after = rollouts:evaluate()
run:print(("held-out %s before: %s"):format(task.metric, before))
run:print(("held-out %s after: %s"):format(task.metric, after))
run:finish()
