-- AdamW with TRL's defaults: decoupled decay (none on norms and biases), clipping by the global
-- norm. States in f32: bf16 weights keep the 16 bits that they lack of fp32 ones beside them, and
-- move as those would, bit for bit (16 bytes a weight with its fp32 gradient). States in bf16:
-- weights and moments are rounded stochastically (10 bytes).
local clip = require("liger.optim.clip")
local gradient = require("liger.gradient")
local lib = require("liger.ffi")
local memory = require("liger.memory")
local ops = require("liger.ops")
local ranks = require("liger.ranks")
local Tensor = require("liger.tensor")

local AdamW = {}
AdamW.__index = AdamW

local M = {}

local CHECK_STEPS = 100 -- between two looks at whether all processes have the same weights

-- Streams of random numbers lie above those of the data: one a step and tensor.
local STREAM, TENSORS = 2 ^ 52, 2 ^ 20

local DEFAULTS = {
  lr = 5e-5,
  beta1 = 0.9,
  beta2 = 0.999,
  eps = 1e-8,
  weight_decay = 0,
  max_grad_norm = 1, -- 0: no clipping
}

local STATES = { f32 = true, bf16 = true }

-- From the first up to, but without, the second.
local RANGES = {
  lr = { 0, math.huge },
  beta1 = { 0, 1 },
  beta2 = { 0, 1 },
  eps = { 0, math.huge },
  weight_decay = { 0, math.huge },
  max_grad_norm = { 0, math.huge },
}

--- Whether a parameter decays: matrices do, norms and biases do not.
---@param name string
---@param tensor liger.Tensor
function M.decays(name, tensor)
  local last = name:match("([^.]*)%.weight$") or ""
  return #tensor.shape >= 2 and not name:find("%.bias$") and not last:find("norm")
    and not last:find("^ln")
end

local function zeros(shape, dtype, owner)
  local t = Tensor.empty(shape, dtype):keep():fill_(0)
  memory.claim(t.storage, owner or "optimiser")
  return t
end

--- An optimiser over named parameters.
---@param parameters liger.Parameter[]  { name, tensor }
---@param options? table  lr, beta1, beta2, eps, weight_decay, max_grad_norm; states: "f32" or, for
--- bf16 parameters, "bf16"; seed of the rounding of bf16 states
function M.new(parameters, options)
  local self = setmetatable({ steps = 0, states = {}, seed = 0, stochastic = false }, AdamW)
  for key, value in pairs(DEFAULTS) do
    self[key] = value
  end
  for key, value in pairs(options or {}) do
    self:_set(key, value)
  end
  for i, p in ipairs(parameters) do
    local t = p.tensor
    if self.stochastic and t.dtype ~= "bf16" then
      lib.raise(
        ("adamw: states is bf16, but %s is %s: wanted bf16 parameters"):format(p.name, t.dtype)
      )
    end
    local acc = self.stochastic and "bf16" or t.dtype == "f64" and "f64" or "f32"
    self.states[i] = {
      name = p.name,
      tensor = t,
      decays = M.decays(p.name, t),
      m = zeros(t.shape, acc),
      v = zeros(t.shape, acc),
      low = t.dtype == "bf16" and not self.stochastic and zeros(t.shape, "bf16") or nil,
    }
  end
  ranks.check_same(self.states)
  return self
end

function AdamW:_set(key, value)
  local range = RANGES[key]
  if key == "states" then
    if not STATES[value] then
      lib.raise(("adamw: states is %s, wanted f32 or bf16"):format(tostring(value)))
    end
    self.stochastic = value == "bf16"
  elseif key == "seed" then
    if type(value) ~= "number" or value % 1 ~= 0 then
      lib.raise(("adamw: seed is %s, wanted a whole number"):format(tostring(value)))
    end
    self.seed = value
  elseif not range then
    lib.raise(("adamw: unknown option %s"):format(tostring(key)))
  elseif type(value) ~= "number" or not (value >= range[1] and value < range[2]) then
    lib.raise(
      ("adamw: %s is %s, wanted a number from %g to below %g"):format(
        key, tostring(value), range[1], range[2]
      )
    )
  else
    self[key] = value
  end
end

-- Moves the i-th parameter.
function AdamW:_update(i, factor, lr)
  local s = self.states[i]
  local decay = s.decays and self.weight_decay or 0
  if self.stochastic then
    ops.adamw_stochastic(
      s.tensor.grad, factor, lr, self.beta1, self.beta2, self.eps, decay, self.steps, self.seed,
      STREAM + self.steps * TENSORS + i, s.tensor, s.m, s.v
    )
  else
    ops.adamw(
      s.tensor.grad, factor, lr, self.beta1, self.beta2, self.eps, decay, self.steps, s.tensor,
      s.m, s.v, s.low
    )
  end
end

-- Adds the gradients of all processes up; one that a process lacks, whose share of the batch was
-- empty, is 0 there.
function AdamW:_add_up()
  ranks.check_shared()
  local here = {}
  for i, s in ipairs(self.states) do
    here[i] = s.tensor.grad and 1 or 0
  end
  local lists = { f32 = {}, f64 = {} }
  for i, n in ipairs(ranks.sum(here)) do
    if n > 0 then
      local grad, made = gradient.of_leaf(self.states[i].tensor)
      table.insert(lists[grad.dtype], made and grad:fill_(0) or grad)
    end
  end
  ranks.sum_all(lists.f32)
  ranks.sum_all(lists.f64)
end

--- One update from the gradients, which are added up over the processes before it and zeroed after
--- it. A norm that is not finite changes nothing; the first tensor whose gradient is to blame has
--- `grad_failed`.
---@param lr? number  rate of this step
---@return number grad_norm  before clipping
---@return boolean updated    false: the norm was not finite and the step was skipped
function AdamW:step(lr)
  lr = lr or self.lr
  local gradients, tensors = {}, {}
  if ranks.size > 1 then
    self:_add_up()
  end
  for _, s in ipairs(self.states) do
    s.tensor.grad_failed = nil
    if s.tensor.grad then
      gradients[#gradients + 1], tensors[#tensors + 1] = s.tensor.grad, s.tensor
    end
  end
  local norm, bad = clip.global_norm(gradients)
  if bad then
    tensors[bad].grad_failed = true -- remembered, as the gradient is zeroed below
  end
  local factor = clip.factor(norm, self.max_grad_norm)
  local finite = norm == norm and norm < math.huge
  if finite then
    self.steps = self.steps + 1
  end
  for i, s in ipairs(self.states) do
    local grad = s.tensor.grad
    if grad and finite then
      self:_update(i, factor, lr)
    end
    if grad then
      grad:fill_(0)
    end
  end
  if self.steps % CHECK_STEPS == 0 then
    ranks.check_same(self.states)
  end
  return norm, finite
end

--- What a checkpoint holds of it besides tensors().
---@return { steps: integer, with_grad: boolean[] }
function AdamW:state()
  local with_grad = {}
  for i, s in ipairs(self.states) do
    with_grad[i] = s.tensor.grad ~= nil
  end
  return { steps = self.steps, with_grad = with_grad }
end

--- Its moments and the low bits of bf16 weights.
---@return { name: string, tensor: liger.Tensor }[]
function AdamW:tensors()
  local list = {}
  for _, s in ipairs(self.states) do
    for _, kind in ipairs({ "m", "v", "low" }) do
      if s[kind] then
        list[#list + 1] = { name = s.name .. "." .. kind, tensor = s[kind] }
      end
    end
  end
  return list
end

--- Goes on from state(). A gradient that was there is there again: one of zeros moves a weight by
--- its moments, one that is missing does not.
---@param state { steps: integer, with_grad: boolean[] }
function AdamW:set_state(state)
  self.steps = state.steps
  for i, s in ipairs(self.states) do
    local t = s.tensor
    if state.with_grad[i] and not t.grad then
      t.grad = zeros(t.shape, t.dtype == "f64" and "f64" or "f32", "gradients")
    end
  end
end

--- Forgets the gradients without an update.
function AdamW:zero_grad()
  for _, s in ipairs(self.states) do
    if s.tensor.grad then
      s.tensor.grad:fill_(0)
    end
  end
end

return M
