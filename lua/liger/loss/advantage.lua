-- Advantages of a group's completions from their rewards (TRL 1.16's GRPO). Plain numbers: this is
-- a few hundred values a step.
local lib = require("liger.ffi")

local M = {}

local EPSILON = 1e-4 -- added to a standard deviation

-- Mean and unbiased standard deviation of the values that are numbers; NaN marks one that does not
-- apply.
local function moments(values)
  local sum, n, low, high = 0, 0, math.huge, -math.huge
  for _, x in ipairs(values) do
    if x == x then
      sum, n = sum + x, n + 1
      low, high = math.min(low, x), math.max(high, x)
    end
  end
  if n == 0 then
    return 0 / 0, 0 / 0, 0
  end
  -- Equal values have their own value as mean, so that differences are exactly 0.
  local mean = low == high and low or sum / n
  local squares = 0
  for _, x in ipairs(values) do
    if x == x then
      squares = squares + (x - mean) ^ 2
    end
  end
  return mean, n > 1 and math.sqrt(squares / (n - 1)) or 0, n
end

local function slice(list, first, last)
  local part = {}
  for i = first, last do
    part[#part + 1] = list[i]
  end
  return part
end

local function finite_or_zero(x)
  return x == x and x or 0
end

-- (x - group mean) / (std + epsilon), std of the group or the batch, or none.
local function normalise(rewards, group, scale)
  local advantages, stds = {}, {}
  local _, batch_std = moments(rewards)
  for first = 1, #rewards, group do
    local mean, std = moments(slice(rewards, first, first + group - 1))
    local divisor = scale == "group" and std + EPSILON or scale == "batch" and batch_std + EPSILON
      or 1
    for i = first, first + group - 1 do
      advantages[i] = finite_or_zero((rewards[i] - mean) / divisor)
      stds[i] = std
    end
  end
  return advantages, stds
end

local function weighted(rewards, weights)
  local totals = {}
  for i, row in ipairs(rewards) do
    local sum, any = 0, false
    for f, x in ipairs(row) do
      if x == x then
        sum, any = sum + (weights and weights[f] or 1) * x, true
      end
    end
    totals[i] = any and sum or 0 / 0
  end
  return totals
end

-- The rewards of function f.
local function column(rows, f)
  local list = {}
  for i, row in ipairs(rows) do
    list[i] = row[f]
  end
  return list
end

-- GDPO: z-scores by function and group, weighted and summed, then normalised over the batch.
local function normalize_then_sum(rewards, group, weights)
  local sums = {}
  for i = 1, #rewards do
    sums[i] = 0
  end
  for f = 1, #rewards[1] do
    for i, a in ipairs((normalise(column(rewards, f), group, "group"))) do
      sums[i] = sums[i] + (weights and weights[f] or 1) * a
    end
  end
  local mean, std = moments(sums)
  for i, x in ipairs(sums) do
    sums[i] = (x - mean) / (std + EPSILON)
  end
  return sums
end

local OPTIONS = {
  group = true, scale_rewards = true, reward_weights = true, multi_objective_aggregation = true,
  names = true,
}

local function check(options)
  for key in pairs(options) do
    if not OPTIONS[key] then
      lib.raise(("advantage: unknown option %s"):format(tostring(key)))
    end
  end
  local group, scale = options.group, options.scale_rewards
  local aggregation = options.multi_objective_aggregation
  if type(group) ~= "number" or group < 1 or group % 1 ~= 0 then
    lib.raise(("advantage: group is %s, wanted a whole number from 1"):format(tostring(group)))
  end
  if scale ~= nil and scale ~= "group" and scale ~= "batch" and scale ~= "none" then
    lib.raise(
      ("advantage: scale_rewards is %s, wanted group, batch or none"):format(tostring(scale))
    )
  end
  if aggregation ~= nil and aggregation ~= "sum_then_normalize"
    and aggregation ~= "normalize_then_sum" then
    lib.raise(
      (
        "advantage: multi_objective_aggregation is %s, wanted sum_then_normalize or "
          .. "normalize_then_sum"
      ):format(tostring(aggregation))
    )
  end
end

-- One row a completion, one column a function.
local function as_rows(rewards, weights)
  if type(rewards[1]) ~= "number" then
    local columns = rewards[1] and #rewards[1]
    if weights and columns and #weights ~= columns then
      lib.raise(
        (
          "advantage: %d reward_weights, wanted one for each of %d functions"
        ):format(#weights, columns)
      )
    end
    return rewards
  end
  local rows = {}
  for i, x in ipairs(rewards) do
    rows[i] = { x }
  end
  return rows
end

--- Advantage of each completion.
---@param rewards number[]|number[][]  one a completion, group by group; or one a function and
---   completion, NaN where it does not apply
---@param options table  group (completions a prompt), scale_rewards ("group", "batch", "none"),
---   reward_weights, multi_objective_aggregation ("sum_then_normalize", "normalize_then_sum"),
---   names (of the functions: their mean and std join the metrics)
---@return number[] advantages
---@return { reward: number, reward_std: number, frac_reward_zero_std: number } metrics
function M.compute(rewards, options)
  check(options)
  local group, scale = options.group, options.scale_rewards or "group"
  if #rewards % group ~= 0 then
    lib.raise(
      ("advantage: %d rewards, wanted a multiple of the group of %d"):format(#rewards, group)
    )
  end
  local rows = as_rows(rewards, options.reward_weights)
  local totals = weighted(rows, options.reward_weights)
  local advantages, stds = normalise(totals, group, scale)
  if options.multi_objective_aggregation == "normalize_then_sum" and #rows > 0 then
    advantages = normalize_then_sum(rows, group, options.reward_weights)
  end
  local mean = moments(totals)
  local zero = 0
  for _, std in ipairs(stds) do
    if std == 0 then
      zero = zero + 1
    end
  end
  -- TRL reports the whole batch's deviation, whatever the advantages are scaled by.
  local _, reported = moments(totals)
  if scale == "batch" then
    zero = reported == 0 and #stds or 0
  end
  local metrics = {
    reward = finite_or_zero(mean),
    reward_std = finite_or_zero(reported),
    frac_reward_zero_std = zero / math.max(#stds, 1),
  }
  for f, name in ipairs(options.names or {}) do
    local value, std, n = moments(column(rows, f))
    if n > 0 then
      metrics[("rewards/%s/mean"):format(name)] = value
      metrics[("rewards/%s/std"):format(name)] = std
    end
  end
  return advantages, metrics
end

return M
