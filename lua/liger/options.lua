-- A function's options: defaults, overridden by the caller's; what each may be, and when it counts.
--
-- A range is { min =, max =, above =, whole = } or a list of choices; { kind = "table",
-- wanted = "a list of ids" } takes what is no number, text or boolean. Its field `with` says what
-- the option needs to have an effect: { "loss_type", "jsd", "tvd" }, another option with one of
-- these values; { "beta", above = 0 } or { "lmbda", below = 1 }, a number, or one that is not known
-- yet (false); { "sampler_mode" }, one that is set; or a list of such, any of which will do. The
-- field `choice` says so for some of the choices, by their names.
local M = {}

-- The command line is read by this before a device is chosen, which ffi opens.
local function raise(message)
  require("liger.ffi").raise(message)
end

--- Whether a range is a list of choices.
function M.is_list(allow)
  return allow and #allow > 0
end

--- What a key takes, in words: "a whole number from 1", "one of grpo, dapo".
---@param key liger.Key
---@return string
function M.wanted(key)
  local allow = key.allow or {}
  if M.is_list(allow) then
    local names = {}
    for i, choice in ipairs(allow) do
      names[i] = tostring(choice)
    end
    return (#names > 1 and "one of " or "") .. table.concat(names, ", ")
  elseif key.kind == "boolean" then
    return "true or false"
  elseif key.kind == "string" then
    return key.none and "a text or none" or "a text"
  elseif key.kind == "any" then
    return "a number, a text or none"
  end
  local text = allow.whole and "a whole number" or "a number"
  if allow.above then
    text = text .. (" above %g"):format(allow.above)
  elseif allow.min then
    text = text .. (" from %g"):format(allow.min)
  end
  if allow.max and allow.max < 2 ^ 31 then
    text = text .. ((allow.above or allow.min) and " to %g" or " up to %g"):format(allow.max)
  end
  return key.none and text .. " or none" or text
end

--- Whether a number is finite and lies in a range.
function M.in_range(value, allow)
  return value - value == 0
    and not (allow.whole and value % 1 ~= 0)
    and not (allow.above and value <= allow.above)
    and not (allow.min and value < allow.min)
    and not (allow.max and value > allow.max)
end

--- Whether a value is one of a list.
function M.is_choice(value, allow)
  for _, choice in ipairs(allow) do
    if choice == value then
      return true
    end
  end
  return false
end

-- ---- when an option counts ----

local function is_set(value)
  return value ~= nil and value ~= false and value ~= 0 and value ~= ""
end

-- Whether a text with commas, or another value, is or holds one of the condition's values.
local function is_one_of(value, condition)
  for i = 2, #condition do
    if value == condition[i] then
      return true
    end
  end
  if type(value) == "string" and value:find(",", 1, true) then
    for word in value:gmatch("[^,%s]+") do
      if is_one_of(word, condition) then
        return true
      end
    end
  end
  return false
end

local function holds(condition, values)
  local value = values[condition[1]]
  if condition.above or condition.below then
    return value == false
      or value > (condition.above or -math.huge) and value < (condition.below or math.huge)
  elseif #condition > 1 then
    return is_one_of(value, condition)
  end
  return is_set(value)
end

local function shown(value, default)
  local none = value == false and default ~= true or value == nil or value == ""
  return none and "none" or tostring(value)
end

local function listed(list)
  local text = table.concat(list, ", ", 1, #list - 1)
  return #list > 1 and text .. " or " .. list[#list] or tostring(list[#list])
end

-- A condition in words: "with loss_type jsd or tvd", "with beta above 0", "without data".
local function in_words(condition)
  local name, choices = condition[1], {}
  for i = 2, #condition do
    choices[i - 1] = tostring(condition[i])
  end
  if condition.above or condition.below then
    local side = condition.above and "above" or "below"
    return ("with %s %s %g"):format(name, side, condition[side])
  elseif #choices == 0 then
    return "with " .. name
  elseif not is_set(condition[2]) then
    return "without " .. name
  end
  return ("with %s %s"):format(name, listed(choices))
end

--- The first of the given options, by name, that the others leave without effect, as text; nil
--- where there is none. One that is off (false, as its default) does not count.
---@param defaults table<string, any>
---@param ranges table<string, table>  see above
---@param values table<string, any>    all options
---@param given table<string, any>     keys: the names of those that were given
---@return string|nil
function M.unread(defaults, ranges, values, given)
  local names, conditions = {}, {}
  for name in pairs(given) do
    local range, value = ranges[name] or {}, values[name]
    conditions[name] = range.with or range.choice and range.choice[value]
    if conditions[name] and (value or defaults[name]) then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local with, got, wanted = conditions[name], {}, {}
    local counts = false
    for i, condition in ipairs(type(with[1]) == "table" and with or { with }) do
      counts = counts or holds(condition, values)
      got[i] = ("%s is %s"):format(condition[1], shown(values[condition[1]]))
      wanted[i] = in_words(condition)
    end
    if not counts then
      local value = shown(values[name], defaults[name])
      return ("%s is %s, which counts only %s: %s"):format(
        name, value, table.concat(wanted, " or "), table.concat(got, " and ")
      )
    end
  end
end

-- ---- a function's options ----

local function check_value(what, name, value, default, allow)
  local none, is_list = default == false and allow ~= nil, M.is_list(allow)
  local kind = allow and allow.kind or not none and type(default) or is_list and "string"
    or "number"
  local fits = type(value) == kind and (is_list and M.is_choice(value, allow)
    or not is_list and (kind ~= "number" or M.in_range(value, allow or {})))
  if not fits and not (none and value == false) then
    local wanted = allow and allow.wanted
      or M.wanted({ kind = kind, allow = allow, none = none })
    raise(("%s: %s is %s, wanted %s"):format(what, name, tostring(value), wanted))
  end
end

local function check_known(what, defaults, given)
  for name in pairs(given) do
    if defaults[name] == nil then
      raise(("%s: unknown option %s"):format(what, tostring(name)))
    end
  end
end

--- The defaults with what was given over them. Raises on an unknown option, on a value of another
--- type or out of range, and on one that has no effect beside the others.
---@param what string                    begins the message
---@param defaults table<string, any>    false: none
---@param ranges table<string, table>    see above; a default of false without one is a boolean
---@param given? table<string, any>
---@return table<string, any>
function M.over(what, defaults, ranges, given)
  local o = {}
  given = given or {}
  check_known(what, defaults, given)
  for name, default in pairs(defaults) do
    o[name] = default
  end
  for name, value in pairs(given) do
    check_value(what, name, value, defaults[name], ranges[name])
    o[name] = value
  end
  local problem = M.unread(defaults, ranges, o, given)
  if problem then
    raise(("%s: %s"):format(what, problem))
  end
  return o
end

--- The defaults, overridden; false becomes nil. Raises on an unknown option.
---@param what string
---@param defaults table<string, any>
---@param given? table<string, any>
---@return table<string, any>
function M.plain(what, defaults, given)
  local o = {}
  check_known(what, defaults, given or {})
  for name, default in pairs(defaults) do
    o[name] = default or nil
  end
  for name, value in pairs(given or {}) do
    o[name] = value or nil
  end
  return o
end

return M
