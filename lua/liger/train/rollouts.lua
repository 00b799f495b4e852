-- The completions of a run: numbered on, so that each draws anew, scored, and ended by Ctrl-C. What
-- the built-in task needs before a method starts: a warm-up, and pairs.
local batch_module = require("liger.rollout.batch")
local config_module = require("liger.train.config")
local lib = require("liger.ffi")
local optim = require("liger.optim")
local pack = require("liger.nn.pack")
local ranks = require("liger.ranks")
local sampler = require("liger.data.sampler")

local Rollouts = {}
Rollouts.__index = Rollouts

local M = {}

local EVAL_ROWS = 128 -- prompts at once, then the progress is drawn
local WARM_UP_STEPS, WARM_UP_ROWS = 1000, 128 -- at most, and a step

---@param run liger.Run         its config: max_completion_length, temperature, seed, cache_bytes
---@param task table            of task.prompts
---@param rewards liger.Rewards
---@return liger.Rollouts
function M.new(run, task, rewards)
  return setmetatable({ run = run, task = task, rewards = rewards, number = 0 }, Rollouts)
end

--- Completions of the rows' prompts, and their mean reward.
---@param rows table[]
---@param options? table  of rollout.generate
---@return liger.Batch|nil batch  nil: Ctrl-C cut it
---@return number mean
---@return number sum
---@return integer count
function Rollouts:complete(rows, options)
  local config = self.run.config
  local batch = batch_module.generate(
    self.task.model, self.task.tokenizer, rows,
    config_module.merge({
      max_new = config.max_completion_length or self.task.max_completion_length,
      temperature = config.temperature, seed = config.seed,
      first_sequence = self.number, cache_bytes = config.cache_bytes,
      interrupted = self.run.should_stop,
    }, options or {})
  )
  self.number = self.number + #batch.samples
  if batch.interrupted then
    return nil
  end
  return batch, batch:score(self.rewards)
end

--- What a checkpoint holds of it.
---@return { number: integer }
function Rollouts:state()
  return { number = self.number }
end

--- Goes on from state().
---@param state { number: integer }
function Rollouts:set_state(state)
  self.number = state.number
end

-- The mean reward of the held-out rows as text.
function Rollouts:_mean(options)
  local total, scored = 0, 0
  for rows in self.run:parts(self.task.held_out, EVAL_ROWS, "held-out") do
    local batch, _, sum, count = self:complete(rows, options)
    if batch then
      total, scored = total + sum, scored + count
    end
  end
  return self.run.should_stop() and "interrupted" or ("%.2f"):format(total / scored)
end

--- Warms the task's model up by cross entropy on its answers, until sampled answers to training
--- problems are right often enough for rewards to differ.
---@param learning_rate number
---@param accuracy number  mean reward of 256 answers that is enough
function Rollouts:warm_up(learning_rate, accuracy)
  local run, model, seed = self.run, self.task.model, self.run.config.seed
  local optimizer = optim.adamw(model:parameters(), { lr = learning_rate })
  local rows = sampler.new(self.task.train, seed)
  local tests = sampler.new(self.task.train, seed + 1)
  for step in run:steps(WARM_UP_STEPS, { label = "warm-up" }) do
    local batch = pack.completions((ranks.share(rows:next(WARM_UP_ROWS))))
    local whole = ranks.sum({ answers = batch.num_completion, tokens = batch.num_tokens })
    local loss = model:cross_entropy(batch, 1 / whole.answers)
    loss:backward()
    local grad_norm = optimizer:step(learning_rate * math.min(1, step / 20))
    local reached = step % 10 == 0 and select(2, self:complete(tests:next(256))) or nil
    run:log({
      loss = ranks.sum(loss:item()), grad_norm = grad_norm, accuracy = reached,
      tokens = whole.tokens,
    })
    if reached and reached >= accuracy then
      run:stop()
    end
  end
end

--- The mean reward of the held-out rows, of two completions each, sampled at temperature 1, and of
--- the greedy one.
---@return string
function Rollouts:evaluate()
  local sampled = self:_mean({ group = 2, temperature = 1 })
  return ("%s sampled, %s greedy"):format(sampled, self:_mean({ greedy = true }))
end

--- Makes pairs of the built-in task's problems: the right answer is chosen, a wrong one that the
--- model samples rejected. Problems that it solves are left out.
---@param enough? integer  stops at so many pairs
function Rollouts:make_pairs(enough)
  local task, list = self.task, {}
  for rows in self.run:parts(task.train, EVAL_ROWS, "pairs") do
    local batch = self:complete(rows)
    for _, s in ipairs(batch and batch.samples or {}) do
      if s.reward == 0 then
        list[#list + 1] = { ids = s.ids, chosen = s.row.completion, rejected = s.completion }
      end
    end
    if enough and #list >= enough then
      break
    end
  end
  if self.run.should_stop() then
    return
  elseif #list == 0 then
    lib.raise(
      ("pairs: all %d sampled answers are right, wanted wrong ones; lower sft_until"):format(
        #task.train
      )
    )
  end
  task.train = list
end

return M
