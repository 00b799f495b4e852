-- What a loop's next step depends on: the things a recipe names, the random numbers, the run's
-- counters. Remembered after each step, written as a checkpoint when it is due, put back by
-- --resume.
local cjson = require("cjson")
local ffi = require("ffi")
local checkpoint = require("liger.train.checkpoint")
local config_module = require("liger.train.config")
local files = require("liger.file")
local fn = require("liger.fn")
local json = require("liger.data.json")
local lib = require("liger.ffi")
local ranks = require("liger.ranks")
local resume = require("liger.train.resume")

local Keep = {}
Keep.__index = Keep

local M = {}

local SEEDS = 2 ^ 31 -- of math.random: one a step

-- ---- one thing ----

-- Refuses what does not read back from JSON: all but numbers, texts, booleans, lists and tables of
-- these by name.
local function check_plain(what, value)
  local kind = type(value)
  if kind ~= "table" then
    if kind ~= "number" and kind ~= "string" and kind ~= "boolean" then
      local text = "keep: %s is a %s, wanted a number, a text, a boolean or a table"
      lib.raise(text:format(what, kind))
    end
    return
  elseif getmetatable(value) then
    local text = "keep: %s has no state() and set_state(), wanted both or a plain table"
    lib.raise(text:format(what))
  end
  local n = #value
  for key, item in pairs(value) do
    if n == 0 and type(key) ~= "string" or n > 0 and not (type(key) == "number" and key <= n) then
      lib.raise(("keep: %s has the key %s, wanted names or a list"):format(what, tostring(key)))
    end
    check_plain(what .. "." .. tostring(key), item)
  end
end

local function has_state(thing)
  return type(thing) == "table" and type(thing.state) == "function"
    and type(thing.set_state) == "function"
end

-- JSON has no NaN and no infinity: in plain tables they are written as { "not finite": NAME }.
local TAG = "not finite"
local not_finite = { nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }

local function tagged(value)
  if type(value) == "table" then
    local y = {}
    for key, item in pairs(value) do
      y[key] = tagged(item)
    end
    return y
  elseif type(value) == "number" and value - value ~= 0 then
    return { [TAG] = value ~= value and "nan" or value > 0 and "inf" or "-inf" }
  end
  return value
end

local function untagged(value)
  if type(value) ~= "table" then
    return value
  elseif value[TAG] then
    return not_finite[value[TAG]]
  end
  local y = {}
  for key, item in pairs(value) do
    y[key] = untagged(item)
  end
  return y
end

local function state_of(name, thing)
  if has_state(thing) then
    return json.encode(thing:state())
  end
  check_plain(name, thing)
  return json.encode(tagged(thing))
end

local function set_state(thing, state)
  if has_state(thing) then
    thing:set_state(state)
    return
  end
  for key in pairs(thing) do
    thing[key] = nil
  end
  for key, value in pairs(untagged(state)) do
    thing[key] = value
  end
end

-- ---- the run's files ----

local function sizes_of(run)
  local sizes = {}
  for name, file in pairs(run.files) do
    sizes[name] = file:seek("end")
  end
  return sizes
end

local function sync(run)
  for name in pairs(run.files) do
    lib.C.lg_sys_sync(run.folder .. "/" .. name)
  end
end

-- What the files of the folder `from` had at a step becomes what the run's have; they go on there.
local function cut(run, from, sizes)
  for name, file in pairs(run.files) do
    file:close()
    local text = files.read(from .. "/" .. name) or ""
    files.write(run.folder .. "/" .. name, text:sub(1, sizes[name] or 0))
    run.files[name] = run.open_append(name)
  end
end

-- ---- all of them ----

--- Takes what run:keep() was given.
---@param run liger.Run
---@param things table<string, table>
function M.new(run, things)
  local self = setmetatable({ run = run, things = {}, base = math.random(0, SEEDS - 1) }, Keep)
  for name, thing in pairs(things) do
    if name == "model" then
      self.model = thing
    elseif type(thing) ~= "table" then
      lib.raise(("keep: %s is a %s, wanted a table"):format(tostring(name), type(thing)))
    else
      self.things[name] = thing
    end
  end
  if self.model and not self.model.named_weights then
    lib.raise("keep: model has no named_weights(), wanted a model")
  end
  run.num_tokens = 0
  self:remember(0)
  return self
end

--- Begins a step: what math.random draws in it depends on it alone.
function Keep:begin(step)
  math.randomseed(self.base + step * SEEDS)
end

--- Notes where everything is but the tensors, which only a step's update changes.
function Keep:remember(step)
  self.step, self.states = step, {}
  for name, thing in pairs(self.things) do
    self.states[name] = state_of(name, thing)
  end
  self.random, self.sizes = fn.random_state(), sizes_of(self.run)
  self.num_tokens = self.run.num_tokens
end

--- Whether the tensors are those of the step that was noted: of what has some, a changed state
--- tells. A model alone tells nothing.
---@return boolean
function Keep:is_unchanged()
  local told = not self.model
  for name, thing in pairs(self.things) do
    if thing.tensors then
      told = true
      if state_of(name, thing) ~= self.states[name] then
        return false
      end
    end
  end
  return told
end

function Keep:_state()
  local run, things = self.run, {}
  for name, text in pairs(self.states) do
    things[name] = cjson.decode(text)
  end
  local given = config_module.parsed(run.config)
  self.inputs = self.inputs or resume.inputs(given)
  return {
    step = self.step, recipe = config_module.recipe_name(), version = run.version,
    device = lib.on_cpu and "cpu" or "cuda",
    machine = ffi.string(lib.C.lg_context_describe(lib.ctx)),
    options = given, config = run.config, inputs = self.inputs, things = things,
    random = { base = self.base, numbers = self.random }, num_tokens = self.num_tokens,
    notes = run.notes, sizes = self.sizes,
  }
end

--- Writes the checkpoint of the step that was noted, unless it is there. Of several processes,
--- which keep the same, the first does.
---@return string folder
function Keep:save()
  local run = self.run
  if self.saved == self.step or not ranks.is_main then
    return run.folder .. "/checkpoint-" .. self.step
  end
  sync(run)
  local content = {
    state = self:_state(), model = self.model, tensors = {},
    tokenizer = self.model and self.model.tokenizer,
  }
  for name, thing in pairs(self.things) do
    content.tensors[name] = thing.tensors and thing:tensors()
  end
  local folder = checkpoint.write(run.folder, self.step, content)
  checkpoint.prune(run.folder, self.step, run.config.save_total_limit or 0)
  self.saved = self.step
  return folder
end

--- Puts everything back to where a checkpoint has it.
---@param from { folder: string, run: string, state: table }
function Keep:restore(from)
  local state, weights = from.state, require("liger.model.weights")
  for name in pairs(state.things) do
    if not self.things[name] then
      lib.raise(("keep: %s has %s, which the recipe does not keep"):format(from.folder, name))
    end
  end
  if self.model then
    local path = from.folder .. "/model.safetensors"
    weights.load(self.model, weights.index({ { path = path, file = weights.open(path) } }), path)
  end
  for name, thing in pairs(self.things) do
    local saved = state.things[name]
    if not saved then
      lib.raise(("keep: %s has no %s, which the recipe keeps"):format(from.folder, name))
    end
    if thing.tensors then
      checkpoint.read_tensors(from.folder, name, thing:tensors())
    end
    set_state(thing, saved)
  end
  self.base = state.random.base
  fn.set_random_state(state.random.numbers)
  self.run.num_tokens = state.num_tokens
  cut(self.run, from.run, state.sizes)
  self:remember(state.step)
  self.saved = from.run == self.run.folder and state.step or nil
end

return M
