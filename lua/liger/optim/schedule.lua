-- Learning-rate schedules: each gives the rate of optimiser step t, counted from 0, as
-- transformers' schedulers do.
local lib = require("liger.ffi")

local M = {}

-- factor(t, o) of the base rate after the warm-up.
local kinds = {}

function kinds.constant()
  return 1
end

function kinds.linear(t, o)
  return math.max(0, (o.steps - t) / math.max(1, o.steps - o.warmup))
end

local function cosine(progress)
  return math.max(0, 0.5 * (1 + math.cos(math.pi * progress)))
end

function kinds.cosine(t, o)
  local floor = o.min_lr_ratio
  return cosine((t - o.warmup) / math.max(1, o.steps - o.warmup)) * (1 - floor) + floor
end

function kinds.inverse_sqrt(t, o)
  local scale = o.warmup > 0 and o.warmup or 10000
  return math.sqrt(scale / (t - o.warmup + scale))
end

function kinds.polynomial(t, o)
  local floor = o.lr > 0 and o.lr_end / o.lr or 0
  if t > o.steps then
    return floor
  end
  return (1 - floor) * (1 - (t - o.warmup) / math.max(1, o.steps - o.warmup)) ^ o.power + floor
end

-- Warm-up, stable, decay: constant, then falling over the last decay_steps to min_lr_ratio.
function kinds.wsd(t, o)
  local decay_start = o.stable_steps and o.warmup + o.stable_steps or o.steps - o.decay_steps
  if t < decay_start then
    return 1
  end
  local progress = math.min(1, (t - decay_start) / math.max(1, o.decay_steps))
  local shape
  if o.decay_type == "linear" then
    shape = 1 - progress
  elseif o.decay_type == "1-sqrt" then
    shape = 1 - math.sqrt(progress)
  else
    shape = cosine(progress)
  end
  return math.max(0, shape * (1 - o.min_lr_ratio) + o.min_lr_ratio)
end

local aliases = {
  constant_with_warmup = "constant",
  cosine_with_min_lr = "cosine",
  warmup_stable_decay = "wsd",
}

local DEFAULTS = {
  lr = 1e-5,
  steps = 1000, -- optimiser steps in all
  warmup = 0, -- steps; a fraction below 1 is a share of `steps`
  min_lr_ratio = 0, -- floor of cosine and wsd, as a share of lr
  lr_end = 1e-7, -- floor of polynomial
  power = 1, -- of polynomial
  decay_steps = 0, -- wsd: length of the fall
  decay_type = "cosine", -- wsd: cosine, linear or 1-sqrt
  stable_steps = false, -- wsd: steps at the full rate; default: what the others leave
}

local DECAY_TYPES = { cosine = true, linear = true, ["1-sqrt"] = true }

local function check(o)
  for key, default in pairs(DEFAULTS) do
    local value = o[key]
    if (type(default) == "number" or value) and key ~= "decay_type" then
      if type(value) ~= "number" or not (value >= 0 and value < math.huge) then
        lib.raise(("schedule: %s is %s, wanted a number from 0"):format(key, tostring(value)))
      end
    end
  end
  if not DECAY_TYPES[o.decay_type] then
    lib.raise(
      ("schedule: decay_type is %s, wanted cosine, linear or 1-sqrt"):format(tostring(o.decay_type))
    )
  end
end

--- A schedule by name: constant, linear, cosine, inverse_sqrt, polynomial, wsd, or transformers'
--- longer names.
---@param name string
---@param options table  lr, steps, warmup, and those of the kind
---@return fun(step: integer): number  rate of step 0, 1, ...
function M.new(name, options)
  local kind = kinds[aliases[name] or name]
  if not kind then
    lib.raise(
      (
        "schedule: name is %s, wanted constant, linear, cosine, inverse_sqrt, polynomial or wsd"
      ):format(tostring(name))
    )
  end
  local o = {}
  for key, value in pairs(DEFAULTS) do
    o[key] = value
  end
  for key, value in pairs(options) do
    if DEFAULTS[key] == nil then
      lib.raise(("schedule: unknown option %s"):format(tostring(key)))
    end
    o[key] = value
  end
  check(o)
  if o.warmup > 0 and o.warmup < 1 then
    o.warmup = math.ceil(o.warmup * o.steps)
  end
  -- wsd climbs from its floor, the others from 0.
  local start = kind == kinds.wsd and o.min_lr_ratio or 0
  return function(step)
    if step < o.warmup then
      return o.lr * (step / o.warmup * (1 - start) + start)
    end
    return o.lr * kind(step, o)
  end
end

return M
