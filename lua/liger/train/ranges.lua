-- What the options that recipes share may be, and when they count (liger.options).
local M = {}

local whole, from_0 = { min = 0, whole = true }, { min = 0 }

--- Of every recipe: data, optimiser, loop.
M.training = {
  holdout = { above = 0, max = 0.9, with = { "data" } }, eval_rows = { min = 1, whole = true },
  max_steps = whole, micro_tokens = whole, learning_rate = from_0,
  lr_scheduler_type = { "constant", "linear", "cosine", "wsd" }, warmup_steps = from_0,
  weight_decay = from_0, max_grad_norm = from_0,
  optim = {
    "adamw", "adamw_bf16", also = "optimizer", choice = { adamw_bf16 = { "dtype", "bf16" } },
  },
}

--- Of those that go through a file's samples in epochs.
M.samples = {
  max_length = { min = 1, whole = true, with = { "data" } }, num_train_epochs = { above = 0 },
  batch_size = { min = 1, whole = true, also = "per_device_train_batch_size" },
}

--- Of those that warm a small model up on sums.
M.warm_up = {
  sft_learning_rate = { min = 0, with = { "data", "" } },
  sft_until = { min = 0, max = 1, with = { "data", "" } },
}

return M
