-- Batches of the preference methods: rows of one prompt with a pair of answers, or with one answer
-- and a label; packed micro-batches that never tear a pair apart, the reference's
-- log-probabilities, and TRL's metrics.
local autograd = require("liger.autograd")
local config_module = require("liger.train.config")
local memory = require("liger.memory")
local metrics = require("liger.train.preference_metrics")
local ops = require("liger.ops")
local pack = require("liger.nn.pack")
local ranges = require("liger.train.ranges")
local ranks = require("liger.ranks")
local reward = require("liger.rollout.reward")
local rollouts_module = require("liger.train.rollouts")
local Tensor = require("liger.tensor")

local Batch = {}
Batch.__index = Batch

local M = {
  logprob = metrics.logprob, seen = metrics.seen, sums = metrics.sums, total = metrics.total,
  metrics = metrics.metrics,
}

M.pair = { "chosen", "rejected" }

--- Limits of the options that the recipes share.
M.ranges = config_module.merge(ranges.training, ranges.samples, ranges.warm_up)

---@class liger.PreferenceRow
---@field ids integer[]          of the prompt
---@field chosen? integer[]      ids of the answers of a pair
---@field rejected? integer[]
---@field completion? integer[]  ids of a single answer
---@field label? boolean         true: it is desirable
---@field ref_logps? table<string, number>  under the reference, by column

--- A step's batch.
---@param rows liger.PreferenceRow[]
---@param columns string[]       those with the answers: preference.pair, { "completion" }, ...
---@param with_prompt? boolean   the first column's sequences predict their prompt too (ORPO)
---@return liger.PreferenceBatch  with num_tokens, of prompts and answers
function M.batch(rows, columns, with_prompt)
  local self = setmetatable(
    { rows = rows, columns = columns, with_prompt = with_prompt, num_tokens = 0, first = 0 }, Batch
  )
  for _, row in ipairs(rows) do
    self.num_tokens = self.num_tokens + self:_count(row)
    self.first = self.first + #row[columns[1]] + (with_prompt and #row.ids - 1 or 0)
  end
  return self
end

function Batch:_count(row)
  local n = 0
  for _, column in ipairs(self.columns) do
    n = n + #row.ids + #row[column]
  end
  return n
end

-- The sample whose completion is all but the first of its tokens.
local function whole(row, completion)
  local rest = {}
  for _, list in ipairs({ row.ids, completion }) do
    for _, id in ipairs(list) do
      rest[#rest + 1] = id
    end
  end
  return { ids = { table.remove(rest, 1) }, completion = rest }
end

-- Starts of prompt and answer among the predicted tokens of each sequence, and the end.
local function answer_starts(samples, rows, columns)
  local starts, at = {}, 0
  for s, sample in ipairs(samples) do
    local answer = #rows[(s - 1) % #rows + 1][columns[math.ceil(s / #rows)]]
    starts[#starts + 1] = at
    at = at + #sample.completion
    starts[#starts + 1] = at - answer
  end
  starts[#starts + 1] = at
  return Tensor.from_table(starts, "i32")
end

--- Packs rows of the batch: first column's sequences first, then the second's.
---@param rows liger.PreferenceRow[]
---@return liger.Pack  of pack.completions, and total_rows, total_tokens (predicted ones of the
---   first column in the whole batch), labels?, ref_logps? [S]; answer_cu [2S+1] i32 of a batch
---   with_prompt: where the prompt's and the answer's predicted tokens start
function Batch:pack(rows)
  local samples, ref = {}, {}
  for i, column in ipairs(self.columns) do
    for _, row in ipairs(rows) do
      samples[#samples + 1] = self.with_prompt and i == 1 and whole(row, row[column])
        or { ids = row.ids, completion = row[column] }
      ref[#ref + 1] = row.ref_logps and row.ref_logps[column]
    end
  end
  local p = pack.completions(samples)
  p.total_rows, p.total_tokens = #self.rows, self.first
  p.items = rows
  p.ref_logps = #ref == #samples and Tensor.from_table(ref) or nil
  if self.with_prompt then
    p.answer_cu = answer_starts(samples, rows, self.columns)
  end
  if rows[1].label ~= nil then
    p.labels = {}
    for i, row in ipairs(rows) do
      p.labels[i] = row.label
    end
  end
  return p
end

--- Micro-batches of at most max_tokens tokens (one row at least).
---@param max_tokens integer  0: no limit
---@return fun(): liger.Pack|nil
function Batch:split(max_tokens)
  local parts = pack.split(self.rows, max_tokens, function(row)
    return self:_count(row)
  end)
  local i = 0
  return function()
    i = i + 1
    return parts[i] and self:pack(parts[i])
  end
end

-- ---- reference ----

--- Log-probability of each answer.
---@param batch table        completion_cu [S+1] i32
---@param logp liger.Tensor  [K]
---@return liger.Tensor      [S]
function M.logps(batch, logp)
  return ops.segment_sum(logp, batch.completion_cu)
end

--- Gives a micro-batch its reference's log-probabilities, unless its rows came with them.
---@param micro liger.Pack
---@param reference liger.Decoder
---@param logps fun(micro: liger.Pack, logp: liger.Tensor): liger.Tensor  [K] to [S]
function M.set_reference(micro, reference, logps)
  micro.ref_logps = micro.ref_logps or memory.scope(autograd.no_grad, function()
    return logps(micro, (reference:logprob(micro)))
  end)
end

--- Gives every row the log-probabilities of its answers under the model as it is now.
---@param run liger.Run
---@param model liger.Decoder
---@param rows liger.PreferenceRow[]
---@param columns string[]
---@param logps fun(micro: liger.Pack, logp: liger.Tensor): liger.Tensor  [K] to [S]
function M.precompute(run, model, rows, columns, logps)
  for part in run:parts(rows, 64, "reference") do
    for micro in M.batch(part, columns):split(run.config.micro_tokens) do
      M.set_reference(micro, model, logps)
      local values, at = micro.ref_logps:read(), 0
      for _, column in ipairs(columns) do
        for _, row in ipairs(micro.items) do
          row.ref_logps = row.ref_logps or {}
          row.ref_logps[column] = tonumber(values[at])
          at = at + 1
        end
      end
    end
    local values = {}
    for i, row in ipairs((ranks.share(part))) do
      values[i] = row.ref_logps
    end
    for i, of_row in ipairs(ranks.join(values)) do
      part[i].ref_logps = of_row
    end
  end
end

--- Log of the sum of the squared probabilities of the vocabulary at each completion token, for WPO:
--- log sum e^(2z) - 2 log sum e^z. No gradient.
---@param model liger.Decoder
---@param micro liger.Pack
---@param hidden liger.Tensor  [N,C]
---@param lse liger.Tensor     [K]
---@return liger.Tensor        [K]
function M.log_p2(model, micro, hidden, lse)
  return autograd.no_grad(function()
    local _, _, sharp = model:logprob(micro, { temperature = 0.5 }, hidden)
    return sharp - lse * 2
  end)
end

-- ---- held-out rows ----

-- Loss and reward accuracy (of single answers: reward margin) as text.
local function summary(values)
  local accuracy, margin = values["rewards/accuracies"], values["rewards/margins"]
  if accuracy then
    return ("%.4f loss, %.3f reward accuracy"):format(values.loss, accuracy)
  elseif margin then
    return ("%.4f loss, %.4f reward margin"):format(values.loss, margin)
  end
  return ("%.4f loss"):format(values.loss)
end

-- The loss of rows that are not trained on, in batches, as text.
local function held_out_loss(run, rows, pass)
  local total = {}
  for part in run:parts(rows, run.config.batch_size, "held-out") do
    M.total(autograd.no_grad(pass, part), total)
  end
  return run.should_stop() and "interrupted" or summary(M.metrics(total))
end

-- ---- a recipe's beginning and end ----

--- Of the built-in sums: warms the model up and makes pairs, right answers and wrong ones of its
--- own, enough for the steps there are.
---@param run liger.Run  its config: sft_learning_rate, sft_until, max_steps, batch_size
---@param task table     of task.preference
---@return liger.Rollouts|nil  nil: the task is a file's
function M.start(run, task)
  if not task.built_in then
    return nil
  end
  local config = run.config
  local rollouts = rollouts_module.new(run, task, reward.new("exact"))
  rollouts:warm_up(config.sft_learning_rate, config.sft_until)
  rollouts:make_pairs(config.max_steps and config.max_steps * config.batch_size)
  return rollouts
end

--- What measures the model on held-out rows, as text: sums by the share of right answers, a file's
--- rows by their loss.
---@param run liger.Run
---@param task table
---@param rollouts liger.Rollouts|nil  of start()
---@param pass fun(rows: liger.PreferenceRow[]): table[]  gives a batch's parts, of sums()
---@return fun(): string
function M.evaluator(run, task, rollouts, pass)
  return function()
    return rollouts and rollouts:evaluate() or held_out_loss(run, task.held_out, pass)
  end
end

--- Saves the model, says how it was before and is now, and ends the run.
---@param run liger.Run
---@param task table
---@param before string            what evaluate gave
---@param evaluate fun(): string
function M.finish(run, task, before, evaluate)
  run:save(task.model, task.tokenizer)
  local after = evaluate()
  run:print(("held-out %s before: %s"):format(task.metric, before))
  run:print(("held-out %s after: %s"):format(task.metric, after))
  run:finish()
end

return M
