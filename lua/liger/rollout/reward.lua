-- Rewards: exact and numeric answers, or functions from a user's Lua files; one or several with
-- weights.
local column = require("liger.data.column")
local files = require("liger.file")
local lib = require("liger.ffi")
local options = require("liger.train.options")

local M = {}

local function trim(text)
  return (text:gsub("^%s+", ""):gsub("%s+$", ""))
end

-- The last number of a text, thousands separators left out; nil when there is none.
local function last_number(text)
  local found, changed
  repeat
    text, changed = text:gsub("(%d),(%d%d%d)%f[%D]", "%1%2")
  until changed == 0
  for number in text:gmatch("%-?%d+%.?%d*") do
    found = tonumber((number:gsub("%.$", "")))
  end
  return found
end

-- What a row lacks, or nil.
local problems = {}

function problems.exact(row)
  return column.problem(row, "answer", "string", "number")
end

function problems.numeric(row)
  return problems.exact(row)
    or not last_number(tostring(row.answer))
      and ("column `answer` is %q, wanted a number in it"):format(row.answer)
    or nil
end

local function answer_of(row, problem)
  if problem then
    lib.raise(("reward: row %s: %s"):format(tostring(row._line or "?"), problem))
  end
  return tostring(row.answer)
end

local builtin = {}

--- 1 when the completion stopped and is the row's answer, white space around it aside.
function builtin.exact(completion, row, sample)
  local answer = answer_of(row, problems.exact(row))
  return (not sample or sample.stopped) and trim(completion) == trim(answer) and 1 or 0
end

--- 1 when the completion's last number is the last number of the row's answer.
function builtin.numeric(completion, row)
  local wanted = last_number(answer_of(row, problems.numeric(row)))
  return last_number(completion) == wanted and 1 or 0
end

--- A reward by name (exact, numeric), or the function that a Lua file returns. A wrong name or file
--- is a usage error.
---@param name string
---@return fun(completion: string, row: table, sample: liger.Sample): number
function M.load(name)
  if builtin[name] then
    return builtin[name]
  end
  if not name:find("%.lua$") then
    options.usage_error(
      ("reward: %s is none; wanted exact, numeric or a Lua file"):format(name)
    )
  end
  local reward, message = files.load_function(name, "function(completion, row)")
  return reward or options.usage_error("reward: " .. message)
end

local function numbers(text)
  local list = {}
  for word in text:gmatch("[^,]+") do
    list[#list + 1] = tonumber(word) or 0 / 0
  end
  return list
end

---@class liger.Rewards
---@field names string[]      of the metrics
---@field functions function[]
---@field weights? number[]   nil: 1 each
---@field check fun(row: table): string|nil  what a row lacks for them

--- Rewards by their names, with commas between; a function that gives nil does not apply to that
--- completion.
---@param names string    each as load() takes it
---@param weights? string  a number each, with commas between; empty: 1 each
---@return liger.Rewards
function M.new(names, weights)
  local self, seen, checks = { names = {}, functions = {} }, {}, {}
  for word in names:gmatch("[^,]+") do
    local name = word:match("([^/]+)$"):gsub("%.lua$", "")
    if seen[name] then
      options.usage_error(("reward: two are named %s"):format(name))
    end
    seen[name], self.names[#self.names + 1] = true, name
    self.functions[#self.functions + 1] = M.load(word)
    checks[#checks + 1] = problems[word]
  end
  if #self.names == 0 then
    options.usage_error("reward: none is named; wanted exact, numeric or a Lua file")
  end
  if weights and weights ~= "" then
    self.weights = numbers(weights)
    local sum = 0
    for _, weight in ipairs(self.weights) do
      sum = sum + weight
    end
    if #self.weights ~= #self.names or sum - sum ~= 0 then
      options.usage_error(
        ("reward: reward_weights is %s, wanted %d numbers with commas between"):format(
          weights, #self.names
        )
      )
    end
  end
  function self.check(row)
    for _, check in ipairs(checks) do
      local problem = check(row)
      if problem then
        return problem
      end
    end
  end
  return self
end

return M
