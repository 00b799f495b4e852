-- GRPO. Without arguments: a small model learns sums of two-digit numbers, first by SFT until it
-- half-knows them, then by trial and reward. With --model and --data: that checkpoint on those
-- prompts.
local liger = require("liger")
local fn, grpo = liger.fn, liger.grpo

local config = liger.config({
  model = "", -- a Hugging Face folder or a GGUF file; empty: a small model, warmed up here
  data = "", -- JSONL with `prompt` or `messages`, and `answer`; empty: sums of two-digit numbers
  reward = "exact", -- exact, numeric, or a Lua file that returns function(completion, row)
  holdout = 0.1, -- share of the data that is only evaluated on
  max_steps = 750,
  prompts_per_step = 32,
  num_generations = 8, -- completions a prompt
  max_completion_length = false, -- tokens; default 5 for sums, 256 for data
  learning_rate = false, -- default 4e-4 for sums, 1e-6 for a checkpoint
  lr_schedule = "wsd", -- constant, linear, cosine or wsd: constant, then falling over the last 30%
  warmup_steps = 20,
  weight_decay = 0,
  max_grad_norm = 1,
  num_iterations = 1, -- updates a batch of completions
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit
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
  mask_truncated_completions = false,
  sft_learning_rate = 1e-3, -- of the small model's warm-up, 128 problems a step
  sft_until = 0.3, -- share of right sampled answers that ends the warm-up
  save = "", -- folder for the trained model
}, {
  loss_type = { "grpo", "bnpo", "dapo", "dr_grpo" },
  lr_schedule = { "constant", "linear", "cosine", "wsd" },
  scale_rewards = { "group", "batch", "none" }, importance_sampling_level = { "token", "sequence" },
  holdout = { above = 0, max = 0.9 },
  max_steps = { min = 0, whole = true },
  prompts_per_step = { min = 1, whole = true }, num_generations = { min = 2, whole = true },
  num_iterations = { min = 1, whole = true },
  temperature = { above = 0 },
})
local run = liger.run(config)
local task = liger.task.prompts(config)
local model, tokenizer = task.model, task.tokenizer
local reward = liger.reward(config.reward)
local max_new = config.max_completion_length or task.max_new
local numbered = 0 -- completions so far: their numbers seed their draws

local function complete(rows, options)
  options.max_new, options.seed, options.first_sequence = max_new, config.seed, numbered
  local batch = liger.rollout(model, tokenizer, rows, options)
  numbered = numbered + #batch.samples
  return batch, batch:score(reward)
end

local function evaluate()
  local _, sampled = complete(task.held_out, { group = 2, temperature = config.temperature })
  local _, greedy = complete(task.held_out, { greedy = true })
  return ("%.2f sampled, %.2f greedy"):format(sampled, greedy)
end

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
    local accuracy = step % 10 == 0 and select(2, complete(tests:next(256), {})) or nil
    run:log({ loss = loss, grad_norm = grad_norm, accuracy = accuracy, tokens = batch.num_tokens })
    if accuracy and accuracy >= config.sft_until then
      break
    end
  end
end
local before = evaluate()

local reference = config.beta > 0 and model:copy()
local base_lr = config.learning_rate or (task.built_in and 4e-4 or 1e-6)
local optimizer = liger.optim.adamw(model:parameters(), {
  lr = base_lr, weight_decay = config.weight_decay, max_grad_norm = config.max_grad_norm,
})
local rate = liger.optim.schedule(config.lr_schedule, {
  lr = base_lr, steps = config.max_steps, warmup = config.warmup_steps, decay_type = "linear",
  decay_steps = math.floor(0.3 * config.max_steps),
})
local options = grpo.options(liger.merge(liger.pick(config, grpo.defaults), {
  max_completion_length = max_new,
}))
local prompts = liger.sampler.new(task.train, config.seed + 2)

for step in run:steps(config.max_steps, { label = "grpo" }) do
  local batch, mean = complete(prompts:next(config.prompts_per_step), {
    group = config.num_generations, temperature = config.temperature,
    top_k = config.top_k, top_p = config.top_p, min_p = config.min_p,
  })
  local advantages, metrics = liger.advantage(batch:rewards(), {
    group = config.num_generations, scale_rewards = config.scale_rewards,
  })
  batch:set_advantages(advantages)
  if config.mask_truncated_completions then
    batch:mask_truncated()
  end
  batch:set_weights(grpo.weights(batch:lengths(), options))
  if reference then
    batch:set_reference(reference, { temperature = config.temperature })
  end
  local loss_sum, sums_of, grad_norm = 0, nil, 0
  for _ = 1, config.num_iterations do
    loss_sum, sums_of = 0, nil
    for micro in batch:split(config.micro_tokens, config.beta > 0) do
      local logp, entropy = model:logprob(micro, { temperature = config.temperature })
      local token_loss, parts = grpo.token_loss(micro, logp, options)
      local loss = fn.masked_sum(token_loss * micro.weight, micro.mask)
      loss:backward()
      loss_sum = loss_sum + loss:item()
      sums_of = grpo.sums(micro, entropy, parts, options, sums_of)
    end
    grad_norm = optimizer:step(rate(step - 1))
  end
  metrics = liger.merge(metrics, batch:metrics(), grpo.metrics(sums_of, options))
  run:log(liger.merge(metrics, {
    loss = loss_sum, reward = mean, grad_norm = grad_norm, learning_rate = rate(step - 1),
    tokens = batch.num_tokens,
    skipped = batch.num_skipped, epoch = prompts:epochs(),
  }))
  local sample = batch.samples[1]
  run:sample({ prompt = sample.row.prompt, completion = sample.text, reward = sample.reward })
end

if config.save ~= "" then
  liger.save(model, config.save, tokenizer)
end
local after = evaluate()
run:print(("held-out %s before: %s"):format(task.metric, before))
run:print(("held-out %s after: %s"):format(task.metric, after))
run:finish()
