-- Rewards: exact and numeric answers, or a function from a user's Lua file.
local lib = require("liger.ffi")

local M = {}

local function trim(text)
  return (text:gsub("^%s+", ""):gsub("%s+$", ""))
end

local function answer_of(row)
  if row.answer == nil then
    lib.raise(("reward: row %s has no column answer"):format(tostring(row._line or "?")))
  end
  return tostring(row.answer)
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

local builtin = {}

--- 1 when the completion stopped and is the row's answer, white space around it aside.
function builtin.exact(completion, row, sample)
  return (not sample or sample.stopped) and trim(completion) == trim(answer_of(row)) and 1 or 0
end

--- 1 when the completion's last number is the last number of the row's answer.
function builtin.numeric(completion, row)
  local wanted = last_number(answer_of(row))
  if not wanted then
    lib.raise(
      ("reward: the answer of row %s has no number: %s"):format(
        tostring(row._line or "?"), answer_of(row)
      )
    )
  end
  return last_number(completion) == wanted and 1 or 0
end

--- A reward by name (exact, numeric), or the function that a Lua file returns.
---@param name string
---@return fun(completion: string, row: table, sample: liger.Sample): number
function M.load(name)
  if builtin[name] then
    return builtin[name]
  end
  if not name:find("%.lua$") then
    lib.raise(("reward: %s is none; wanted exact, numeric or a Lua file"):format(name))
  end
  local chunk, message = loadfile(name)
  if not chunk then
    lib.raise(("reward: %s"):format(message))
  end
  local reward = chunk()
  if type(reward) ~= "function" then
    lib.raise(
      ("reward: %s returned %s, wanted a function(completion, row)"):format(name, type(reward))
    )
  end
  return reward
end

return M
