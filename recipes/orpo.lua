-- ORPO. Without arguments: a small model half-learns sums of two-digit numbers by SFT, then goes
-- on from pairs of the right answer and a wrong one of its own. With --model and --data: that
-- checkpoint on those pairs.
local liger = require("liger")
local orpo, preference = liger.orpo, liger.preference

local config = liger.config({
  model = "", -- a Hugging Face folder or a GGUF file; empty: a small model, warmed up here
  data = "", -- JSONL with `prompt`, `chosen` and `rejected`; empty: sums of two-digit numbers
  holdout = 0.1, -- share of the data that is only evaluated on
  eval_rows = 1000, -- rows of it at most
  max_length = 1024, -- tokens of prompt and answer, number or none; longer ones are cut at the end
  num_train_epochs = false, -- passes over the data; default 3
  max_steps = false, -- steps, whatever the epochs are; default 150 for sums, the epochs' for data
  batch_size = false, -- pairs a step of all processes; default 64 for sums, 8 for data
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit
  learning_rate = false, -- default 3e-4 for sums, 1e-6 for data
  lr_scheduler_type = "linear", -- constant, linear, cosine or wsd
  warmup_steps = false, -- default 10 for sums, 0 for data
  optim = "adamw", -- or adamw_bf16: of bf16 weights, states in bf16 too (10 bytes a weight, not 16)
  weight_decay = 0,
  max_grad_norm = 1, -- 0: no clipping
  gradient_checkpointing = false, -- recompute layers in the backward: less memory, more time
  beta = 0.1, -- weight of the odds ratio's term
  sft_learning_rate = 1e-3, -- of the small model's warm-up, 128 problems a step
  sft_until = 0.3, -- share of right sampled answers that ends the warm-up
  save = "", -- folder for the trained model
}, liger.merge(preference.ranges, orpo.ranges))
liger.fill(config, config.data == "" and {
  max_steps = not config.num_train_epochs and 150, batch_size = 64, learning_rate = 3e-4,
  warmup_steps = 10,
} or {
  num_train_epochs = 3, batch_size = 8, learning_rate = 1e-6, warmup_steps = 0,
})
local options = orpo.options(liger.pick(config, orpo.defaults))

local task = liger.task.preference(config, "pairs")
local model, run = task.model, liger.run(config)
model.checkpointing = config.gradient_checkpointing
run:watch(model:parameters())
local rollouts = preference.start(run, task) -- of sums: a warm-up, then pairs

-- What the log needs of each micro-batch, and the batch; with gradients where `backward`.
local function pass(rows, backward)
  local batch, parts = preference.batch(rows, preference.pair, true), {}
  for micro in batch:split(config.micro_tokens) do
    local logp, seen = preference.logprob(model, micro)
    local loss, values = orpo.loss(micro, logp, options)
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
for step in run:steps(config.max_steps, { label = "orpo" }) do
  local parts, batch = pass(samples:next(config.batch_size), true)
  local grad_norm = optimizer:step(rate(step - 1))
  run:log(liger.merge(preference.metrics(preference.total(parts)), {
    grad_norm = grad_norm, learning_rate = rate(step - 1), tokens = batch.num_tokens,
    epoch = samples:epochs(),
  }))
end

preference.finish(run, task, before, evaluate)
