-- What a recipe trains on: the built-in sums with a small model, or a checkpoint and a file of
-- prompts.
local decoder = require("liger.model")
local lib = require("liger.ffi")
local options = require("liger.train.options")
local prompts = require("liger.data.prompts")

local M = {}

local function built_in(config)
  local sums = require("liger.data.sums")
  local task = sums.new(config.seed)
  task.model = decoder.from_config(sums.config, { dtype = config.dtype }):init(
    config.seed, sums.init_std
  )
  task.model.stop_ids = { sums.newline }
  task.built_in, task.metric = true, "accuracy"
  return task
end

local function load_model(config)
  if config.model == "" or config.data == "" then
    options.usage_error(
      ("--%s without --%s: a checkpoint and its data go together"):format(
        config.model == "" and "data" or "model", config.model == "" and "model" or "data"
      )
    )
  end
  local model, tokenizer = decoder.load(config.model, { dtype = config.dtype })
  if not tokenizer then
    lib.raise(("%s: there is no tokenizer.json beside the model"):format(config.model))
  end
  return { model = model, tokenizer = tokenizer, built_in = false }
end

-- The task with its rows in two parts; of the second no more than config.eval_rows are kept.
local function split(task, rows, config)
  if rows then
    task.train, task.held_out = prompts.split(rows, config.holdout or 0.1, config.seed)
  end
  for i = #task.held_out, (config.eval_rows or math.huge) + 1, -1 do
    task.held_out[i] = nil
  end
  return task
end

--- Prompts with answers, for rollouts: config.model and config.data, both empty for the built-in
--- sums.
---@param config table  model, data, holdout, eval_rows, seed, dtype, max_completion_length
---@param rewards? liger.Rewards  the rows are checked for what these need
---@return { model: liger.Decoder, tokenizer: liger.Tokenizer, train: table[], held_out: table[],
---   built_in: boolean, metric: string }
function M.prompts(config, rewards)
  if config.model == "" and config.data == "" then
    return split(built_in(config), nil, config)
  end
  local task = load_model(config)
  local rows = prompts.load(config.data, task.tokenizer, {
    check = rewards and rewards.check, context = task.model.config.max_position_embeddings,
    max_completion_length = config.max_completion_length,
  })
  task.metric = "reward"
  return split(task, rows, config)
end

--- Samples to imitate: as prompts(), rows with `ids` and `completion`, the ids of prompt and
--- answer.
---@param config table  model, data, seed, dtype; holdout (default 0.1), eval_rows, max_length
---   (default: all)
function M.supervised(config)
  if config.model == "" and config.data == "" then
    return split(built_in(config), nil, config)
  end
  local task = load_model(config)
  local rows = prompts.supervised(
    config.data, task.tokenizer, config.max_length or math.huge,
    task.model.config.max_position_embeddings
  )
  return split(task, rows, config)
end

return M
