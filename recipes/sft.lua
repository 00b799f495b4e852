-- Supervised fine-tuning. Without arguments: a small model learns sums of two-digit numbers. With
-- --model and --data: that checkpoint on that file: `text`, `messages`, or `prompt` and
-- `completion` (then only the completion is learnt).
local liger = require("liger")
local sft = liger.sft

local config = liger.config({
  model = "", -- a Hugging Face folder or a GGUF file; empty: a small model
  data = "", -- JSONL; empty: sums of two-digit numbers
  holdout = 0.1, -- share of the data that is only evaluated on
  max_length = 1024, -- tokens a sample; longer ones are cut on the right
  max_steps = 300,
  batch_size = 128, -- samples a step
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit
  learning_rate = false, -- default 1e-3 for sums, 2e-5 for a checkpoint
  lr_schedule = "linear", -- constant, linear, cosine or wsd
  warmup_steps = 20,
  weight_decay = 0,
  max_grad_norm = 1,
  gradient_checkpointing = false, -- recompute layers in the backward: less memory, more time
  save = "", -- folder for the trained model
}, {
  lr_schedule = { "constant", "linear", "cosine", "wsd" },
  holdout = { above = 0, max = 0.9 },
  max_steps = { min = 0, whole = true },
  batch_size = { min = 1, whole = true },
})

local run = liger.run(config)
local task = liger.task.supervised(config)
local model = task.model
model.checkpointing = config.gradient_checkpointing

local base_lr = config.learning_rate or (task.built_in and 1e-3 or 2e-5)
local optimizer = liger.optim.adamw(model:parameters(), {
  lr = base_lr, weight_decay = config.weight_decay, max_grad_norm = config.max_grad_norm,
})
local rate = liger.optim.schedule(config.lr_schedule, {
  lr = base_lr, steps = config.max_steps, warmup = config.warmup_steps,
  decay_steps = math.floor(0.3 * config.max_steps),
})

-- Sums over the targets of the samples: loss, entropy, correct, tokens. `scale` is the weight of a
-- token; nil: no gradients.
local function pass(samples, scale)
  local total = { loss = 0, entropy = 0, correct = 0, tokens = 0 }
  for _, part in ipairs(liger.pack.split(samples, config.micro_tokens)) do
    local scope = liger.memory.open_scope()
    local batch = liger.pack.completions(part)
    local loss, rows = model:cross_entropy(batch, scale or 1)
    if scale then
      loss:backward()
    end
    for key, value in pairs(sft.sums(batch, rows)) do
      total[key] = total[key] + value
    end
    liger.memory.close_scope(scope)
  end
  return total
end

local function evaluate()
  local total = liger.no_grad(pass, task.held_out)
  local count = math.max(total.tokens, 1)
  return ("%.4f loss, %.3f token accuracy"):format(total.loss / count, total.correct / count)
end

local before = evaluate()
local samples, seen = liger.sampler.new(task.train, config.seed), 0
for step in run:steps(config.max_steps, { label = "sft" }) do
  local batch = samples:next(config.batch_size)
  local targets = 0
  for _, sample in ipairs(batch) do
    targets = targets + #sample.completion
  end
  local total = pass(batch, 1 / targets)
  local grad_norm = optimizer:step(rate(step - 1))
  seen = seen + targets
  run:log({
    loss = total.loss / targets, entropy = total.entropy / targets,
    mean_token_accuracy = total.correct / targets, grad_norm = grad_norm,
    learning_rate = rate(step - 1), num_tokens = seen, tokens = targets, epoch = samples:epochs(),
  })
end

if config.save ~= "" then
  liger.save(model, config.save, task.tokenizer)
end
local after = evaluate()
run:print("held-out before: " .. before)
run:print("held-out after: " .. after)
run:finish()
