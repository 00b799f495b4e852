-- Supervised fine-tuning. Without arguments: a small model learns sums of two-digit numbers. With
-- --model and --data: that checkpoint on that file: `text`, `messages`, or `prompt` and
-- `completion` (then only the completion is learnt).
local liger = require("liger")
local sft = liger.sft

local config = liger.config({
  model = "", -- a Hugging Face folder or a GGUF file; empty: a small model
  data = "", -- JSONL; empty: sums of two-digit numbers
  holdout = 0.1, -- share of the data that is only evaluated on
  eval_rows = 1000, -- rows of it at most
  max_length = 1024, -- tokens a sample; longer ones are cut on the right
  num_train_epochs = false, -- passes over the data; default 3
  max_steps = false, -- steps, whatever the epochs are; default 300 for sums, the epochs' for data
  batch_size = false, -- samples a step of all processes; default 128 for sums, 8 for data
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit
  loss_type = "nll", -- nll, or dft: tokens count by the probability they have
  label_smoothing = 0, -- share of the target that all tokens have evenly
  learning_rate = false, -- default 1e-3 for sums, 2e-5 for data
  lr_scheduler_type = "linear", -- constant, linear, cosine or wsd
  warmup_steps = false, -- default 20 for sums, 0 for data
  optim = "adamw", -- or adamw_bf16: of bf16 weights, states in bf16 too (10 bytes a weight, not 16)
  weight_decay = 0,
  max_grad_norm = 1, -- 0: no clipping
  gradient_checkpointing = false, -- recompute layers in the backward: less memory, more time
  save = "", -- folder for the trained model
}, liger.merge(liger.ranges.training, liger.ranges.samples, {
  loss_type = { "nll", "dft" },
  label_smoothing = { min = 0, max = 1, also = "label_smoothing_factor" },
}))
liger.fill(config, config.data == "" and {
  max_steps = not config.num_train_epochs and 300, batch_size = 128, learning_rate = 1e-3,
  warmup_steps = 20,
} or { num_train_epochs = 3, batch_size = 8, learning_rate = 2e-5, warmup_steps = 0 })

local task = liger.task.supervised(config)
liger.fill(config, {
  max_steps = math.ceil((config.num_train_epochs or 0) * #task.train / config.batch_size),
})
local model, run = task.model, liger.run(config)
model.checkpointing = config.gradient_checkpointing
run:watch(model:parameters())

local optimizer, rate = liger.optimizer(model, config)

local loss_options = {
  token_scaling = config.loss_type == "dft", label_smoothing = config.label_smoothing,
}

-- A micro-batch's sums for the log; `scale` is the weight of a token.
local function learn(samples, scale)
  local batch = liger.pack.completions(samples)
  local loss, rows = model:cross_entropy(batch, scale, loss_options)
  loss:backward()
  return sft.sums(batch, rows)
end

local function evaluate()
  return liger.evaluate(run, model, task.held_out, loss_options)
end

local before = run:once("before", evaluate)
local samples = liger.sampler.new(task.train, config.seed)
run:keep({ model = model, optimizer = optimizer, samples = samples })
for step in run:steps(config.max_steps, { label = "sft" }) do
  local batch = samples:next(config.batch_size)
  local targets, tokens = 0, 0
  for _, sample in ipairs(batch) do
    targets = targets + #sample.completion
    tokens = tokens + #sample.ids + #sample.completion
  end
  local parts = {}
  for i, part in ipairs(liger.pack.split(batch, config.micro_tokens)) do
    parts[i] = liger.scope(learn, part, 1 / targets)
  end
  local grad_norm = optimizer:step(rate(step - 1))
  local total = sft.total(parts)
  run:log({
    loss = total.loss / targets, entropy = total.entropy / targets,
    mean_token_accuracy = total.correct / targets, grad_norm = grad_norm,
    learning_rate = rate(step - 1), tokens = tokens, epoch = samples:epochs(),
  })
end

run:save(model, task.tokenizer)
local after = evaluate()
run:print("held-out before: " .. before)
run:print("held-out after: " .. after)
run:finish()
