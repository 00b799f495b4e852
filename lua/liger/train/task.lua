-- What a recipe trains on: the built-in sums with a small model, or a checkpoint and a file of
-- prompts.
local column = require("liger.data.column")
local decoder = require("liger.model")
local files = require("liger.file")
local preference = require("liger.data.preference")
local options = require("liger.train.options")
local prompts = require("liger.data.prompts")

local M = {}

-- An untrained model for the sums.
local function model_of_sums(sums, config, seed)
  local model = decoder.from_config(sums.config, { dtype = config.dtype })
  model:init(seed, sums.init_std).stop_ids = { sums.newline }
  return model
end

local function built_in(config)
  local sums = require("liger.data.sums")
  local task = sums.new(config.seed)
  task.model = model_of_sums(sums, config, config.seed)
  task.model.tokenizer = task.tokenizer
  task.built_in, task.metric, task.max_completion_length = true, "accuracy", sums.longest
  return task
end

local function load_model(config)
  if config.model == "" then
    options.usage_error(
      "--data without --model: wanted a checkpoint beside it; the built-in model becomes one by "
        .. "`liger run sft --save FOLDER`, then --model FOLDER"
    )
  elseif config.data == "" then
    options.usage_error("--model without --data: wanted a file of rows beside the checkpoint")
  end
  local model, tokenizer = decoder.load(config.model, { dtype = config.dtype })
  if not tokenizer then
    files.fail(config.model, "there is no tokenizer.json, wanted one beside the model")
  end
  return { model = model, tokenizer = tokenizer, built_in = false }
end

-- The task with its rows in two parts; of the second no more than config.eval_rows are kept.
local function split(task, rows, config)
  if rows then
    task.train, task.held_out = prompts.split(rows, config.holdout or 0.1, config.seed, config.data)
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
---@param answers? boolean  of a chat only the last message, the assistant's, is learnt
function M.supervised(config, answers)
  if config.model == "" and config.data == "" then
    return split(built_in(config), nil, config)
  end
  local task = load_model(config)
  local rows = prompts.supervised(
    config.data, task.tokenizer, config.max_length or math.huge,
    task.model.config.max_position_embeddings, answers
  )
  return split(task, rows, config)
end

-- Ids mean the same to both, up to where the smaller vocabulary ends.
local function check_tokenizers(student, teacher, config)
  for id = 0, math.min(student.model.shape.vocab, teacher.model.shape.vocab) - 1 do
    local a, b = student.tokenizer:token(id), teacher.tokenizer:token(id)
    if a and b and a ~= b then
      files.fail(
        config.teacher, "token %d is %q, wanted %q as in %s: distillation needs one tokenizer", id,
        b, a, config.model
      )
    end
  end
end

-- Every sample has a prompt that the student can complete.
local function check_prompts(task, config)
  local longest = config.max_completion_length
  local context = task.model.config.max_position_embeddings or math.huge
  for _, s in ipairs(task.train) do
    local problem = not s.row.prompt
        and "column `prompt` is missing, wanted what to complete, or --lmbda 0"
      or prompts.too_long(s.ids, longest, context)
    if problem then
      column.fail(config.data, s.row, "%s", problem)
    end
  end
end

--- Samples as supervised(), and whom to imitate on them: `teacher`, a model, or the samples'
--- `teacher` of config.teacher_logprobs (data/teacher.lua). Of the built-in sums the teacher is a
--- model that the recipe trains first, and `model` starts from other weights. Of a chat the last
--- message is learnt.
---@param config table  as supervised(), and teacher, teacher_logprobs, lmbda
function M.distill(config)
  if config.model == "" and config.data == "" then
    for _, name in ipairs({ "teacher", "teacher_logprobs" }) do
      if config[name] ~= "" then
        options.usage_error(("--%s without --model: it needs a student and data"):format(name))
      end
    end
    local sums = require("liger.data.sums")
    local task = M.supervised(config)
    task.teacher = task.model
    task.model = model_of_sums(sums, config, config.seed + 1)
    task.model.tokenizer = task.tokenizer
    return task
  elseif config.model ~= "" and config.data ~= ""
    and (config.teacher == "") == (config.teacher_logprobs == "") then
    options.usage_error("--model needs a teacher: --teacher or --teacher_logprobs, one of them")
  end
  if config.teacher_logprobs ~= "" and config.lmbda > 0 then
    options.usage_error("--lmbda above 0 needs --teacher: a file knows nothing of new completions")
  end
  local task = M.supervised(config, true)
  if config.lmbda > 0 then
    check_prompts(task, config)
  end
  if config.teacher_logprobs ~= "" then
    local vocab = task.model.shape.vocab
    for _, rows in ipairs({ task.train, task.held_out }) do
      require("liger.data.teacher").load(config.teacher_logprobs, rows, vocab)
    end
    return task
  end
  local teacher = {}
  teacher.model, teacher.tokenizer = decoder.load(config.teacher, { dtype = config.dtype })
  if teacher.tokenizer then
    check_tokenizers(task, teacher, config)
  end
  task.teacher = teacher.model
  return task
end

--- Pairs of answers, or answers with labels: as prompts(), rows as data.preference reads them. The
--- built-in sums are prompts still: rollouts:make_pairs() makes pairs of them.
---@param config table  model, data, holdout, eval_rows, seed, dtype, max_length
---@param form "pairs"|"labelled"
function M.preference(config, form)
  if config.model == "" and config.data == "" then
    return split(built_in(config), nil, config)
  end
  local task = load_model(config)
  task.metric = "answers"
  return split(task, preference[form](config.data, task.tokenizer, {
    max_length = config.max_length, context = task.model.config.max_position_embeddings,
  }), config)
end

return M
