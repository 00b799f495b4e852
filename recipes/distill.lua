-- Distillation of a teacher into a student (GKD, Agarwal et al. 2024, with a choice of losses).
-- Without arguments: a small model learns sums of two-digit numbers by SFT, then another
-- learns them from it. With --model, --data and --teacher (or --teacher-logprobs): that student on
-- that file, which is as for recipes/sft.lua.
local liger = require("liger")
local distill = liger.distill

local own = { { "lmbda", above = 0 }, { "data", "" } } -- the student completes prompts
local config = liger.config({
  model = "", -- the student: a Hugging Face folder or a GGUF file; empty: a small model
  data = "", -- JSONL; empty: sums of two-digit numbers
  teacher = "", -- a Hugging Face folder or a GGUF file of the same tokenizer
  -- JSONL, a line for each of the data's: {"ids": [[95, 12], [10]], "logprobs": [[-0.1, -3], [0]]}
  -- has the teacher's likeliest ids for each completion token. What these lack of probability 1 is
  -- that of "any other token", one class to the loss
  teacher_logprobs = "", -- a file in place of a teacher; its format stands in the recipe
  holdout = 0.1, -- share of the data that is only evaluated on
  eval_rows = 1000, -- rows of it at most
  max_length = 1024, -- tokens a sample; longer ones are cut on the right
  max_steps = false, -- default 400 for sums, the epochs' for data
  num_train_epochs = false, -- passes over the data; default 3
  batch_size = false, -- samples a step of all processes; default 128 for sums, 8 for data
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit
  learning_rate = false, -- default 1e-3 for sums, 2e-5 for data
  lr_scheduler_type = "linear", -- constant, linear, cosine or wsd
  warmup_steps = false, -- default 20 for sums, 0 for data
  optim = "adamw", -- or adamw_bf16: of bf16 weights, states in bf16 too (10 bytes a weight, not 16)
  weight_decay = 0,
  max_grad_norm = 1, -- 0: no clipping
  loss_type = "ce_tvd", -- ce_tvd, tvd, jsd, forward_kl, reverse_kl or cosine
  beta = 0.5, -- of jsd: 0 is forward_kl, 1 reverse_kl
  loss_temperature = 1, -- of both softmaxes
  weight_hard = false, -- of the cross entropy; default 1 for ce_tvd, 0 for the others
  weight_soft = 1,
  lmbda = false, -- share of steps on own completions; default 0.5, 0.25 for sums, 0 with a file
  temperature = 0.9, -- of these completions
  max_completion_length = false, -- tokens; default 5 for sums, 128 for data
  teacher_until = 0.8, -- share of right sampled answers that ends the small teacher's SFT
  save = "", -- folder for the trained student
}, liger.merge(liger.ranges.training, liger.ranges.samples, distill.ranges, {
  loss_temperature = distill.ranges.temperature, lmbda = { min = 0, max = 1 },
  weight_hard = { min = 0, with = { "lmbda", below = 1 } }, -- own completions have no such term
  temperature = { above = 0, with = own },
  max_completion_length = { min = 1, whole = true, with = own },
  teacher_until = { min = 0, max = 1, with = { "data", "" } },
}))
liger.fill(config, config.data == "" and {
  max_steps = not config.num_train_epochs and 400, batch_size = 128, learning_rate = 1e-3,
  warmup_steps = 20, max_completion_length = 5,
} or {
  num_train_epochs = 3, batch_size = 8, learning_rate = 2e-5, warmup_steps = 0,
  max_completion_length = 128,
})
liger.fill(config, {
  lmbda = config.teacher_logprobs ~= "" and 0 or config.data ~= "" and 0.5 or 0.25,
})
local given = liger.merge(
  liger.pick(config, distill.defaults), { temperature = config.loss_temperature }
)
local options = distill.options(given)
-- On its own completions the student imitates the teacher alone.
local own_options = config.lmbda > 0 and distill.options(liger.merge(given, { weight_hard = 0 }))
local task = liger.task.distill(config)
liger.fill(config, {
  max_steps = math.ceil((config.num_train_epochs or 0) * #task.train / config.batch_size),
})
local student, teacher, run = task.model, task.teacher, liger.run(config)
run:watch(student:parameters())

local reward = task.built_in and liger.reward("exact") or function() return 0 end
local rollouts = liger.rollouts(run, task, reward)
local teacher_rollouts = liger.rollouts(run, liger.merge(task, { model = teacher }), reward)

-- Of the sums also the share of right answers.
local function evaluate(model, of)
  local text = liger.evaluate(run, model, task.held_out)
  return task.built_in and ("%s, %s right"):format(text, of:evaluate()) or text
end

if task.built_in then
  teacher_rollouts:warm_up(1e-3, config.teacher_until)
  run:print("held-out teacher: " .. evaluate(teacher, teacher_rollouts))
end
local before = run:once("before", function() return evaluate(student, rollouts) end)

local optimizer, rate = liger.optimizer(student, config)
local rows = liger.sampler.new(task.train, config.seed + 1)

-- A micro-batch's sums for the log; `scale` is the weight of a token.
local function learn(samples, of_step, scale)
  local batch = liger.pack.completions(samples)
  if not teacher then
    liger.teacher.attach(batch, samples)
  end
  local loss, of_rows = distill.loss(student, teacher, batch, of_step, scale)
  loss:backward()
  return distill.sums(batch, of_rows)
end

run:keep({ model = student, optimizer = optimizer, rows = rows, rollouts = rollouts })
for step in run:steps(config.max_steps, { label = "distill" }) do
  local samples, on_policy = rows:next(config.batch_size), math.random() < config.lmbda
  if on_policy then
    local batch = rollouts:complete(samples)
    if not batch then
      break -- Ctrl-C
    end
    samples = batch.samples
  end
  local targets, sums, of_step = 0, {}, on_policy and own_options or options
  for _, sample in ipairs(samples) do
    targets = targets + #sample.completion
  end
  for i, part in ipairs(liger.pack.split(samples, config.micro_tokens)) do
    sums[i] = liger.scope(learn, part, of_step, 1 / targets)
  end
  local grad_norm = optimizer:step(rate(step - 1))
  run:log(liger.merge(distill.metrics(distill.total(sums), of_step), {
    grad_norm = grad_norm, learning_rate = rate(step - 1), tokens = targets,
    epoch = rows:epochs(), on_policy = on_policy and 1 or 0,
  }))
end

run:save(student, task.tokenizer)
local after = evaluate(student, rollouts)
run:print("held-out before: " .. before)
run:print("held-out after: " .. after)
run:finish()
