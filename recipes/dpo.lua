-- DPO. Without arguments: a small model half-learns sums of two-digit numbers by SFT, then goes
-- on from pairs of the right answer and a wrong one of its own. With --model and --data: that
-- checkpoint on those pairs.
local liger = require("liger")
local dpo, preference = liger.dpo, liger.preference

local config = liger.config({
  model = "", -- a Hugging Face folder or a GGUF file; empty: a small model, warmed up here
  data = "", -- JSONL with `prompt`, `chosen` and `rejected`; empty: sums of two-digit numbers
  holdout = 0.1, -- share of the data that is only evaluated on
  eval_rows = 1000, -- rows of it at most
  max_length = 1024, -- tokens of prompt and answer, number or none; longer ones are cut at the end
  num_train_epochs = false, -- passes over the data; default 3
  max_steps = false, -- steps, whatever the epochs are; default 150 for sums, the epochs' for data
  batch_size = false, -- pairs a step of all processes; default 64 for sums, 8 for data
  micro_tokens = 16384, -- tokens a forward takes in; 0: no limit. aot takes the batch whole
  learning_rate = false, -- default 3e-4 for sums, 1e-6 for data
  lr_scheduler_type = "linear", -- constant, linear, cosine or wsd
  warmup_steps = false, -- default 10 for sums, 0 for data
  optim = "adamw", -- or adamw_bf16: of bf16 weights, states in bf16 too (10 bytes a weight, not 16)
  weight_decay = 0,
  max_grad_norm = 1, -- 0: no clipping
  gradient_checkpointing = false, -- recompute layers in the backward: less memory, more time
  loss_type = "sigmoid", -- sigmoid, sigmoid_norm, hinge, ipo, exo_pair, nca_pair, robust, bco_pair,
                         -- sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft; or a,b
  loss_weights = "", -- a number for each loss, as 0.8,1; empty: 1 each
  beta = false, -- how much the policy keeps to the reference; default 2 for sums, 0.1 for data
  label_smoothing = 0, -- of sigmoid (cDPO), exo_pair, robust, aot and aot_unpaired
  f_divergence_type = "reverse_kl", -- or forward_kl, js_divergence, alpha_divergence
  f_alpha_divergence_coef = 0.5,
  ld_alpha = false, -- number or none: weight of tokens beyond the pair's shorter answer
  use_weighting = false, -- WPO
  discopop_tau = 0.05,
  reference_free = false, -- no reference model: its log-probabilities count as 0
  precompute_ref_log_probs = false, -- before the first step, so that no reference stays in memory
  sft_learning_rate = 1e-3, -- of the small model's warm-up, 128 problems a step
  sft_until = 0.3, -- share of right sampled answers that ends the warm-up
  save = "", -- folder for the trained model
}, liger.merge(preference.ranges, dpo.ranges, {
  precompute_ref_log_probs = { with = { "reference_free", false } },
}))
liger.fill(config, config.data == "" and {
  max_steps = not config.num_train_epochs and 150, batch_size = 64, learning_rate = 3e-4,
  warmup_steps = 10, beta = 2,
} or {
  num_train_epochs = 3, batch_size = 8, learning_rate = 1e-6, warmup_steps = 0, beta = 0.1,
})
local options = dpo.options(liger.pick(config, dpo.defaults))
local limit = options.is_sorted and 0 or config.micro_tokens

local task = liger.task.preference(config, "pairs")
local model, run = task.model, liger.run(config)
model.checkpointing = config.gradient_checkpointing
run:watch(model:parameters())
local rollouts = preference.start(run, task) -- of sums: a warm-up, then pairs

local function logps(batch, logp)
  return dpo.logps(batch, logp, options)
end

local reference
if config.precompute_ref_log_probs then
  for _, rows in ipairs({ task.train, not task.built_in and task.held_out or {} }) do
    preference.precompute(run, model, rows, preference.pair, logps)
  end
elseif not options.reference_free then
  reference = model:copy()
end

-- What the log needs of each micro-batch, and the batch; with gradients where `backward`.
local function pass(rows, backward)
  local batch, parts = preference.batch(rows, preference.pair), {}
  for micro in batch:split(limit) do
    if not options.reference_free then
      preference.set_reference(micro, reference, logps)
    end
    local logp, seen = preference.logprob(model, micro)
    micro.log_p2 = options.use_weighting
      and preference.log_p2(model, micro, seen.hidden, seen.lse)
    local loss, values = dpo.loss(micro, logp, options)
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
for step in run:steps(config.max_steps, { label = "dpo" }) do
  local parts, batch = pass(samples:next(config.batch_size), true)
  local grad_norm = optimizer:step(rate(step - 1))
  run:log(liger.merge(preference.metrics(preference.total(parts)), {
    grad_norm = grad_norm, learning_rate = rate(step - 1), tokens = batch.num_tokens,
    epoch = samples:epochs(),
  }))
end

preference.finish(run, task, before, evaluate)
