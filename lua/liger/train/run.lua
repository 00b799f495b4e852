-- A run: the loop's memory, metrics, samples, checkpoints, and the end by Ctrl-C or by
-- a NaN. A recipe drives it:
--
--   for step in run:steps(n) do ... run:log { loss = loss } end
--
-- Of several processes the first writes the files and prints.
local ffi = require("ffi")
local blame = require("liger.train.blame")
local config_module = require("liger.train.config")
local folder = require("liger.train.folder")
local lib = require("liger.ffi")
local memory = require("liger.memory")
local progress = require("liger.train.progress")
local ranks = require("liger.ranks")
local Tensor = require("liger.tensor")

local C = lib.C

local M = {}

local Run = {}
Run.__index = Run

local open_runs = {} -- those that finish() was not called for
local any_interrupted = false -- of those that it was called for

-- ---- opening ----

local function new_progress(config)
  -- mpirun gives processes a terminal of its own, wherever its output goes.
  local is_terminal = ranks.size == 1 and C.lg_sys_isatty(1)
  return progress.new({
    quiet = config.quiet or not ranks.is_main,
    clock = function()
      return C.lg_sys_time()
    end,
    columns = is_terminal and function()
      return C.lg_sys_columns()
    end or nil,
    write = function(text)
      io.stdout:write(text)
      io.stdout:flush()
    end,
  })
end

-- Whether there was a Ctrl-C. Several processes must answer alike wherever they ask: as they agreed
-- at the last end of a step or part.
local function is_interrupted(run)
  if ranks.size == 1 then
    return C.lg_sys_interrupted()
  end
  return run.agreed or false
end

local function agree(run)
  run.agreed = ranks.any(C.lg_sys_interrupted())
end

-- is_interrupted, which is answered when it is first seen.
local function notice(run)
  local interrupted = is_interrupted(run)
  if interrupted and not run.noticed then
    run.noticed = true
    run:print("interrupted: ends after this step; again to stop at once")
  end
  return interrupted
end

-- Says what --resume found.
local function tell_resumed(run, from)
  for _, c in ipairs(from and from.broken or {}) do
    run:print(("%s is not whole and stays as it is: %s"):format(c.folder, c.problem))
  end
  if from and not from.folder then
    run:print(("%s has no checkpoint yet: begins at step 1"):format(run.folder))
  end
end

--- Opens a run: makes its folder with config.json, metrics.jsonl and samples.jsonl, and that of
--- config.save where there is one. From here on Ctrl-C ends the loop after its step; a second one
--- ends the program.
---@param config table  what liger.config returned
---@return liger.Run
function M.new(config)
  if type(config) ~= "table" or type(config.out) ~= "string" then
    error("run: config is no table of liger.config", 2)
  end
  local from = config_module.resumed(config)
  if ranks.is_main then
    folder.probe_save(config, from)
  end
  local in_program, sys = pcall(require, "liger.sys")
  ranks.barrier() -- all have seen the folder as it was
  local run = setmetatable({
    config = config,
    folder = ranks.broadcast(ranks.is_main and folder.make(config, from)),
    version = in_program and sys.version or "unknown",
    -- The checkpoint to go on from, until keep() has put it back: what comes before is done again,
    -- and not logged again.
    resuming = from and from.folder and from,
    notes = from and from.state and from.state.notes or {}, -- see once
    num_tokens = 0, -- of the loop that runs now
    step = 0, -- of the loop that runs now
    interrupted = false,
    files = {}, -- by name
    watched = {}, -- { name, tensor }, see watch
    values = {}, -- the last logged
    started_at = C.lg_sys_time(),
    progress = new_progress(config),
  }, Run)
  run.open_append = function(name)
    return folder.open_append(run.folder .. "/" .. name)
  end
  if ranks.is_main then
    folder.open_files(run, from)
  end
  tell_resumed(run, from)
  -- True once there was a Ctrl-C: what takes long may ask, and end early.
  run.should_stop = function()
    return notice(run)
  end
  open_runs[#open_runs + 1] = run
  C.lg_sys_catch_interrupt(true)
  return run
end

-- ---- the loop ----

-- Ctrl-C may leave a kept loop by `break`: its last whole step is saved, if what is kept is still
-- as it was then.
function Run:_leave_loop()
  local kept = self.running
  self.running = nil
  if kept and kept.step > 0 and is_interrupted(self) then
    if kept:is_unchanged() then
      self:_save_checkpoint(kept)
    else
      self:print(("not saved: step %d was under way"):format(kept.step + 1))
    end
  end
end

function Run:_save_checkpoint(kept)
  local saved = kept:save()
  if is_interrupted(self) then
    self:print(("saved %s; --resume %s goes on"):format(saved, self.folder))
  end
end

--- What the next loop depends on, by name: `model`, whatever has state() and set_state() (an
--- optimiser, a sampler, rollouts), plain tables of numbers and texts. The loop then saves
--- checkpoints: each config.save_steps steps, at its end and at Ctrl-C. With --resume they
--- are put back here, and the loop goes on behind that step with the same bits.
---
--- All that comes before is done again by --resume; once() spares what only gives a number or text.
--- A step of the loop must depend on nothing else that earlier steps change; what math.random
--- draws in it depends on the step alone.
---@param things table<string, table>
function Run:keep(things)
  self.kept = require("liger.train.keep").new(self, things)
  local from = self.resuming
  if from and not self.should_stop() then
    self.resuming = nil
    self.kept:restore(from)
    local machine = ffi.string(C.lg_context_describe(lib.ctx))
    local other = not lib.on_cpu and machine ~= from.state.machine
      and (", on a %s: bits may differ"):format(from.state.machine) or ""
    self.progress:close()
    self:print(("resumed from %s (step %d%s)"):format(from.folder, from.state.step, other))
  end
end

--- What a function gives, a number or a text, called once in a run however often it is resumed.
---@generic T
---@param name string
---@param f fun(): T
---@return T
function Run:once(name, f)
  if self.notes[name] == nil then
    self.notes[name] = f()
  end
  return self.notes[name]
end

function Run:_close_scope()
  if self.scope then
    memory.close_scope(self.scope)
    self.scope = nil
  end
end

--- Names what comes next in the progress line and in the metrics.
---@param name string
---@param total? integer  steps it has, where there is no loop to say so
function Run:phase(name, total)
  self:_leave_loop()
  self.progress:close()
  self.num_tokens, self.first_step = 0, 0
  self.phase_name, self.total, self.step, self.values = name, total, 0, {}
end

-- The end of a step of a kept loop.
function Run:_end_step(kept, step, is_last)
  local every = self.config.save_steps or 0
  kept:remember(step)
  if self.interrupted or every > 0 and (is_last or step % every == 0) then
    self:_save_checkpoint(kept)
  end
end

--- Steps 1 to n (config.steps), or from the one behind a checkpoint. What a step makes is freed
--- when it ends, unless tensor:keep() keeps it. A loop that is left by `break` keeps its last
--- step's memory until the next loop or finish(), and what is made in between goes with it; stop()
--- ends a loop without that.
---@param n? integer
---@param settings? { label: string }  starts a phase of that name
---@return fun(): integer|nil
function Run:steps(n, settings)
  n = n or self.config.steps
  if type(n) ~= "number" or n % 1 ~= 0 or n < 0 then
    error(("steps: n is %s, wanted a whole number from 0"):format(tostring(n)), 2)
  end
  self:_close_scope()
  self:phase(settings and settings.label or self.phase_name, n)
  self.loop_started_at, self.stopping = C.lg_sys_time(), false
  local kept = self.kept
  local first = kept and kept.step or 0
  local step = first
  self.kept, self.running, self.first_step = nil, kept, first
  self.num_tokens = kept and kept.num_tokens or 0
  return function()
    self:_close_scope()
    agree(self)
    if is_interrupted(self) and not self.interrupted then
      self.interrupted, self.noticed = true, true
      self.progress:close()
      self:print(("interrupted after step %d"):format(step))
    end
    local is_last = self.interrupted or self.stopping or step >= n or self.finished
    if kept and step > first and not self.finished then
      self:_end_step(kept, step, is_last)
    end
    if is_last then
      self.running = nil
      self.progress:close()
      return nil
    end
    step = step + 1
    self.step, self.step_started_at = step, C.lg_sys_time()
    self.scope = memory.open_scope()
    if kept then
      kept:begin(step)
    end
    return step
  end
end

--- Ends the loop after this step.
function Run:stop()
  self.stopping = true
end

--- The rows in parts of at most `size`, drawn as a phase of that name. What a part makes is freed
--- when it ends. Ctrl-C ends it after its part.
---@generic T
---@param rows T[]
---@param size integer
---@param name string
---@return fun(): T[]|nil
function Run:parts(rows, size, name)
  self:_close_scope()
  self:phase(name, math.ceil(#rows / size))
  self.loop_started_at = C.lg_sys_time()
  return function()
    self:_close_scope()
    if self.step > 0 then
      self:_show({}, C.lg_sys_time())
    end
    agree(self)
    if self.step == self.total or self.should_stop() then
      self.progress:close()
      return nil
    end
    local part = {}
    for i = self.step * size + 1, math.min(#rows, (self.step + 1) * size) do
      part[#part + 1] = rows[i]
    end
    self.step = self.step + 1
    self.scope = memory.open_scope()
    return part
  end
end

-- ---- metrics ----

local own_metrics = { step = true, phase = true, step_time = true }

local function metric(name, value)
  if own_metrics[name] then
    error(("log: %s is the run's own, choose another name"):format(name), 3)
  elseif Tensor.is(value) then
    if value:numel() ~= 1 then
      local shape = Tensor.shape_text(value.shape)
      error(("log: %s is %s, wanted one element"):format(name, shape), 3)
    end
    return value:item()
  elseif type(value) ~= "number" then
    local text = "log: %s is a %s, wanted a number or a tensor of one element"
    error(text:format(name, type(value)), 3)
  end
  return value
end

--- Adds a tensor, or a model's parameters, to those that are looked through, in this order, when a
--- loss or a gradient is not finite.
---@param name string|liger.Parameter[]
---@param tensor? liger.Tensor
function Run:watch(name, tensor)
  local list = type(name) == "table" and name or { { name = name, tensor = tensor } }
  for _, entry in ipairs(list) do
    self.watched[#self.watched + 1] = entry
  end
end

--- Stops the run at a loss or grad_norm that is NaN or infinite, and names the tensor to blame.
---@param values { loss?: number, grad_norm?: number }
function Run:check(values)
  for _, name in ipairs({ "loss", "grad_norm" }) do
    local value = values[name]
    if value and value - value ~= 0 then
      local text = value ~= value and "nan" or value > 0 and "inf" or "-inf"
      local blamed = blame.first(self.watched)
      blamed = blamed and "; the first tensor with NaN or Inf is " .. blamed or ""
      error(("step %d: %s is %s%s"):format(self.step, name, text, blamed), 0)
    end
  end
end

--- Writes the step's metrics. `step`, `phase` and `step_time` (seconds since the step began) are
--- added, and where there is `tokens` also `tokens_per_second`, and the loop's `num_tokens`. A loss
--- or grad_norm that is NaN or infinite stops the run.
---@param values table<string, number|liger.Tensor>
function Run:log(values)
  local line = {}
  for name, value in pairs(values) do
    line[name] = metric(name, value)
  end
  local now = C.lg_sys_time()
  for name, value in pairs(line) do
    self.values[name] = value
  end
  line.step, line.phase = self.step, self.phase_name
  line.step_time = now - (self.step_started_at or self.started_at)
  if line.tokens then
    self.num_tokens = self.num_tokens + line.tokens
    line.num_tokens = line.num_tokens or self.num_tokens
    line.tokens_per_second = line.tokens_per_second or line.tokens / line.step_time
  end
  folder.append(self, "metrics.jsonl", line)
  self:check(line)
  self.should_stop()
  self:_show(line, now)
end

function Run:_show(line, now)
  local total = self.total or self.step
  local left
  if self.loop_started_at and self.step > self.first_step and self.step < total then
    left = (now - self.loop_started_at) / (self.step - self.first_step) * (total - self.step)
  end
  self.progress:update({
    step = self.step,
    total = total,
    phase = self.phase_name,
    values = self.values,
    tokens_per_second = line.tokens_per_second,
    live_bytes = memory.stats().live,
    seconds_left = left,
  })
end

--- Writes a line to samples.jsonl: any strings, numbers and tables; `step` and `phase` are added.
---@param values table
function Run:sample(values)
  local line = {}
  for name, value in pairs(values) do
    line[name] = value
  end
  line.step, line.phase = self.step, self.phase_name
  folder.append(self, "samples.jsonl", line)
end

--- Prints a line without breaking the live one.
function Run:print(text)
  if ranks.is_main then
    self.progress:print(tostring(text))
  end
end

-- ---- the end ----

local function forget(run)
  for i, other in ipairs(open_runs) do
    if other == run then
      table.remove(open_runs, i)
      return
    end
  end
end

--- Saves the model to config.save, where that is given.
---@param model liger.Decoder
---@param tokenizer? liger.Tokenizer
function Run:save(model, tokenizer)
  self:_leave_loop()
  if self.resuming then
    return -- Ctrl-C came before the checkpoint was put back
  end
  if (self.config.save or "") ~= "" and ranks.is_main then
    require("liger.model").save(model, self.config.save, tokenizer)
  end
end

function Run:_close()
  self.finished = true
  self.interrupted = self.interrupted or is_interrupted(self)
  self:_leave_loop()
  self:_close_scope()
  self.progress:close()
  for _, file in pairs(self.files) do
    file:close()
  end
  forget(self)
  if #open_runs == 0 then
    C.lg_sys_catch_interrupt(false)
  end
  any_interrupted = any_interrupted or self.interrupted
end

--- Closes the loop and the files, and names the folder. The program does it too, when a recipe ends
--- in any way; after an error the folder is not named, so that the error is what comes last.
function Run:finish()
  if self.finished then
    return
  end
  self:_close()
  if not self.config.quiet then
    local seconds = C.lg_sys_time() - self.started_at
    self:print(("%s  %s"):format(self.folder, progress.duration(seconds)))
  end
  if self.resuming and not self.interrupted then
    error("run: --resume found nothing to put back: the recipe calls no run:keep before a loop", 0)
  end
end

--- Finishes every run that is still open; true when one was interrupted.
---@param failed? boolean  there was an error
---@return boolean
function M.finish_all(failed)
  while open_runs[1] do
    local run = open_runs[1]
    if failed then
      run:_close()
    else
      run:finish()
    end
  end
  local result = any_interrupted
  any_interrupted = false
  return result
end

return M
