-- KTO. Without arguments: a small model half-learns sums of two-digit numbers by SFT, then goes
-- on with right answers and wrong ones of its own, labelled so. With --model and --data: that
-- checkpoint on those answers.
local liger = require("liger")
local fn, kto, preference = liger.fn, liger.kto, liger.preference

local config = liger.config({
  model = "", -- a Hugging Face folder or a GGUF file; empty: a small model, warmed up here
  data = "", -- JSONL with `prompt`, `completion` and `label`, or pairs; empty: sums
  holdout = 0.1, -- share of the data that is only evaluated on
  eval_rows = 1000, -- rows of it at most
  max_length = 1024, -- tokens of prompt and answer, number or none; longer ones are cut at the end
  num_train_epochs = false, -- passes over the data; default 3
  max_steps = false, -- steps, whatever the epochs are; default 150 for sums, the epochs' for data
  batch_size = false, -- answers a step of all processes; default 128 for sums, 8 for data
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit
  learning_rate = false, -- default 3e-4 for sums, 1e-6 for data
  lr_scheduler_type = "linear", -- constant, linear, cosine or wsd
  warmup_steps = false, -- default 10 for sums, 0 for data
  optim = "adamw", -- or adamw_bf16: of bf16 weights, states in bf16 too (10 bytes a weight, not 16)
  weight_decay = 0,
  max_grad_norm = 1, -- 0: no clipping
  gradient_checkpointing = false, -- recompute layers in the backward: less memory, more time
  loss_type = "kto", -- kto or apo_zero_unpaired
  beta = false, -- how much the policy keeps to the reference; default 2 for sums, 0.1 for data
  desirable_weight = 1,
  undesirable_weight = 1,
  precompute_ref_log_probs = false, -- before the first step, so that no reference stays in memory
  sft_learning_rate = 1e-3, -- of the small model's warm-up, 128 problems a step
  sft_until = 0.3, -- share of right sampled answers that ends the warm-up
  save = "", -- folder for the trained model
}, liger.merge(preference.ranges, kto.ranges))
liger.fill(config, config.data == "" and {
  max_steps = not config.num_train_epochs and 150, batch_size = 128, learning_rate = 3e-4,
  warmup_steps = 10, beta = 2,
} or {
  num_train_epochs = 3, batch_size = 8, learning_rate = 1e-6, warmup_steps = 0, beta = 0.1,
})
local options = kto.options(liger.pick(config, kto.defaults))
local has_kl = options.loss_type == "kto"
local columns = has_kl and { "completion", "mismatched" } or { "completion" }

local task = liger.task.preference(config, "labelled")
local model, run = task.model, liger.run(config)
model.checkpointing = config.gradient_checkpointing
run:watch(model:parameters())
local rollouts = preference.start(run, task) -- of sums: a warm-up, then pairs
for _, name in ipairs({ "train", "held_out" }) do
  task[name] = liger.unpair(task[name])
  if has_kl then
    liger.mismatch(task[name], task.train, config.seed, config.max_length)
  end
end

local reference
if config.precompute_ref_log_probs then
  for _, rows in ipairs({ task.train, not task.built_in and task.held_out or {} }) do
    preference.precompute(run, model, rows, columns, preference.logps)
  end
else
  reference = model:copy()
end

-- Sum of log p - log p_ref over a micro-batch's answers.
local function log_ratio(micro)
  preference.set_reference(micro, reference, preference.logps)
  return fn.sum(preference.logps(micro, (model:logprob(micro))) - micro.ref_logps)
end

-- The KL estimate of a batch, from its prompts with answers to others.
local function kl_of(rows)
  local sum = fn.zeros()
  for micro in preference.batch(rows, { "mismatched" }):split(config.micro_tokens) do
    sum = sum + liger.scope(log_ratio, micro)
  end
  return kto.kl(liger.ranks.sum(sum:item()), #rows)
end

-- What the log needs of each micro-batch, and the batch; with gradients where `backward`.
local function pass(rows, backward)
  local batch, parts = preference.batch(rows, { "completion" }), {}
  batch.kl = has_kl and liger.no_grad(kl_of, rows) or 0
  for micro in batch:split(config.micro_tokens) do
    micro.kl = batch.kl
    preference.set_reference(micro, reference, preference.logps)
    local logp, seen = preference.logprob(model, micro)
    local loss, values = kto.loss(micro, logp, options)
    if backward then
      loss:backward()
    end
    parts[#parts + 1] = preference.sums(micro, loss, values, seen)
  end
  return parts, batch
end

local evaluate = preference.evaluator(run, task, rollouts, pass)
local before = run:once("before", evaluate)
liger.fill(config, {
  max_steps = math.ceil((config.num_train_epochs or 0) * #task.train / config.batch_size),
})
local optimizer, rate = liger.optimizer(model, config)
local samples = liger.sampler.new(task.train, config.seed + 2)
run:keep({ model = model, optimizer = optimizer, samples = samples, rollouts = rollouts })
for step in run:steps(config.max_steps, { label = "kto" }) do
  local parts, batch = pass(samples:next(config.batch_size), true)
  local grad_norm = optimizer:step(rate(step - 1))
  run:log(liger.merge(preference.metrics(preference.total(parts)), {
    grad_norm = grad_norm, learning_rate = rate(step - 1), tokens = batch.num_tokens,
    epoch = samples:epochs(), kl = batch.kl,
  }))
end

preference.finish(run, task, before, evaluate)
