-- The optimiser and its learning rates, as the options that every recipe has say.
local config_module = require("liger.train.config")
local optim = require("liger.optim")

local M = {}

--- AdamW on a model's parameters, and its schedule.
---@param model liger.Decoder
---@param config table     optim, seed, learning_rate, lr_scheduler_type, max_steps, warmup_steps,
---   weight_decay, max_grad_norm
---@param schedule? table  further options of optim.schedule
---@return liger.AdamW
---@return fun(step: integer): number rate  of step 0, 1, ...
function M.new(model, config, schedule)
  local optimizer = optim.adamw(model:parameters(), {
    lr = config.learning_rate, weight_decay = config.weight_decay,
    max_grad_norm = config.max_grad_norm, seed = config.seed,
    states = config.optim == "adamw_bf16" and "bf16" or "f32",
  })
  return optimizer, optim.schedule(config.lr_scheduler_type, config_module.merge({
    lr = config.learning_rate, steps = config.max_steps, warmup = config.warmup_steps,
    decay_steps = math.floor(0.3 * config.max_steps),
  }, schedule or {}))
end

return M
