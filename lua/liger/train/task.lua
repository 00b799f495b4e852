-- What a recipe trains on: the built-in sums with a small model, or a checkpoint and a file of
-- prompts.
local decoder = require("liger.model")
local lib = require("liger.ffi")
local prompts = require("liger.data.prompts")

local M = {}

local function built_in(config)
  local sums = require("liger.data.sums")
  local task = sums.new(config.seed)
  task.model = decoder.from_config(sums.config, { dtype = config.dtype }):init(
    config.seed, sums.init_std
  )
  task.model.stop_ids = { sums.newline }
  task.max_new, task.built_in, task.metric = sums.max_new, true, "accuracy"
  return task
end

local function load_model(config)
  if config.model == "" or config.data == "" then
    lib.raise(
      ("config: --%s without --%s: a checkpoint and its data go together"):format(
        config.model == "" and "data" or "model", config.model == "" and "model" or "data"
      )
    )
  end
  local model, tokenizer = decoder.load(config.model, { dtype = config.dtype })
  if not tokenizer then
    lib.raise(("%s: there is no tokenizer.json beside the model"):format(config.model))
  end
  return model, tokenizer
end

--- Prompts with answers, for rollouts: config.model and config.data, both empty for the built-in
--- sums.
---@param config table  model, data, holdout, seed, dtype
---@return { model: liger.Decoder, tokenizer: liger.Tokenizer, train: table[], held_out: table[],
---   max_new: integer, built_in: boolean }
function M.prompts(config)
  if config.model == "" and config.data == "" then
    return built_in(config)
  end
  local model, tokenizer = load_model(config)
  local train, held_out = prompts.split(
    prompts.load(config.data, tokenizer), config.holdout, config.seed
  )
  return {
    model = model, tokenizer = tokenizer, train = train, held_out = held_out,
    max_new = 256, built_in = false, metric = "reward",
  }
end

--- Samples to imitate: as prompts(), rows with `ids` and `completion`, the ids of prompt and
--- answer.
---@param config table  model, data, holdout, seed, dtype, max_length
function M.supervised(config)
  if config.model == "" and config.data == "" then
    return built_in(config)
  end
  local model, tokenizer = load_model(config)
  local samples = prompts.supervised(config.data, tokenizer, config.max_length)
  local train, held_out = prompts.split(samples, config.holdout, config.seed)
  return {
    model = model, tokenizer = tokenizer, train = train, held_out = held_out, built_in = false,
  }
end

return M
