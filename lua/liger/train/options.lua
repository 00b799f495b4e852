-- Reads a command line against a list of keys: types, ranges, the nearest name of a wrong one, and
-- the help's columns. Knows nothing of recipes; config.lua and the commands say which keys there
-- are.
local device = require("liger.device")
local limits = require("liger.options")

local M = {}

---@class liger.Key
---@field name string
---@field default number|string|boolean
---@field comment? string
---@field allow? table     { min =, max =, above =, whole = } or a list of choices; with = when it
---   counts, see liger.options; also = another name
---@field show? string     what the help prints for the default
---@field alone? string    the value where none follows

--- Options of more than one command.
---@type table<string, liger.Key>
M.common = {
  seed = {
    name = "seed",
    default = 0,
    comment = "seed of all random numbers",
    allow = { min = 0, max = 2 ^ 52, whole = true },
  },
  threads = {
    name = "threads",
    default = 0,
    comment = "CPU threads of a process; 0: all cores",
    allow = { min = 0, max = 4096, whole = true },
  },
  dtype = {
    name = "dtype",
    default = "f32",
    comment = "of the weights: f32 or bf16",
    allow = { "f32", "bf16" },
  },
  device = {
    name = "device", default = "auto", comment = "auto (a GPU when there is one), cpu or cuda:N",
  },
}

--- Refuses what is no name of a device.
---@param name string
function M.check_device(name)
  if name ~= "auto" and name ~= "cpu" and name ~= "cuda" and not name:match("^cuda:%d+$") then
    M.usage_error(("--device: got %q, wanted auto, cpu or cuda:N"):format(name))
  end
end

--- Ends the command with exit status 2: it was used wrongly.
---@param message string
function M.usage_error(message)
  error({ message = message, code = 2 }, 0)
end

-- ---- names ----

-- Letters to insert, drop or change to make b of a; - and _ are the same.
local function distance(a, b)
  local row = {}
  for j = 0, #b do
    row[j] = j
  end
  for i = 1, #a do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #b do
      local change = diagonal + (a:byte(i) == b:byte(j) and 0 or 1)
      diagonal = row[j]
      row[j] = math.min(change, row[j] + 1, row[j - 1] + 1)
    end
  end
  return row[#b]
end

local function plain(name)
  return (name:lower():gsub("-", "_"))
end

-- learning_rate -> lr
local function initials(name)
  return (name:gsub("(%w)%w*_?", "%1"))
end

--- The name that `word` most likely means: the nearest, where initials (learning_rate), a place in
--- front (optim.lr) and a `no-` count as one letter.
---@param word string
---@param names string[]
---@return string|nil  nil when there are no names
function M.nearest(word, names)
  local best, least
  word = plain(word)
  local last, agreed = word:match("[^.]*$"), word:gsub("^no_", "")
  local short = { [initials(word)] = true, [last] = true, [agreed] = true }
  for _, name in ipairs(names) do
    local other = plain(name)
    local away = distance(word, other)
    if short[other] or initials(other) == word then
      away = math.min(away, 1)
    end
    if not least or away < least then
      best, least = name, away
    end
  end
  return best
end

-- ---- values ----

local function to_number(text)
  return text:match("^[+-]?%.?%d[%d.]*[eE]?[+-]?%d*$") and tonumber(text) or nil
end

-- The value that a text means for the key, or nil.
local function convert(key, text)
  local kind, allow = key.kind, key.allow or {}
  if key.none and text == "none" and not limits.is_choice(text, allow) then
    return false
  end
  local value = text
  if kind == "boolean" then
    value = ({ ["true"] = true, ["false"] = false })[text]
  elseif kind == "number" then
    value = to_number(text)
  elseif kind == "any" then
    value = to_number(text) or text
  end
  if limits.is_list(allow) then
    return limits.is_choice(value, allow) and value or nil
  elseif type(value) == "number" and not limits.in_range(value, allow) then
    return nil
  end
  return value
end

local none_words = {
  number = "number",
  text = "string",
  string = "string",
  path = "string",
  file = "string",
}

--- Works out what each key takes. A default of `false` whose comment says "number or none" or "path
--- or none" takes that; one that says "default 128" takes a number or none; one with a list of
--- choices takes these or none.
---@param keys liger.Key[]
function M.prepare(keys)
  for _, key in ipairs(keys) do
    key.kind = type(key.default)
    local comment = key.comment or ""
    local word = comment:match("(%w+) or none")
    if not word and key.default == false then
      word = limits.is_list(key.allow) and "text" or comment:find("default %-?[%d.]") and "number"
    end
    if word then
      key.none = true
      if key.default == false then
        key.kind = none_words[word] or "any"
      end
    end
  end
  return keys
end

-- ---- the command line ----

local function index_of(keys)
  local by_name, names = {}, {}
  for _, key in ipairs(keys) do
    by_name[plain(key.name)] = key
    if key.allow and key.allow.also then
      by_name[plain(key.allow.also)] = key
    end
    names[#names + 1] = key.name
  end
  return by_name, names
end

-- The key that a name means and whether it was said as --no-key.
local function find(by_name, name)
  local key = by_name[plain(name)]
  if key then
    return key, false
  end
  local denied = name:match("^no[-_](.+)$")
  key = denied and by_name[plain(denied)]
  if key and (key.kind == "boolean" or key.none) then
    return key, true
  end
end

local function unknown(name, names)
  local near = M.nearest(name, names)
  M.usage_error(
    ("--%s: unknown option%s"):format(name, near and ", did you mean --" .. near .. "?" or "")
  )
end

-- The value of a key: what stands behind its `=`, or the next word. Returns it and the next index.
-- `--flag true` is a value only where no word may stand alone.
local function value_of(key, text, args, i, no_words)
  if not text and key.kind == "boolean" then
    if not no_words or args[i] ~= "true" and args[i] ~= "false" then
      return true, i
    end
    text, i = args[i], i + 1
  elseif not text then
    if key.alone and (not args[i] or args[i]:sub(1, 2) == "--") then
      return key.alone, i
    end
    text, i = args[i], i + 1
    if not text or text:sub(1, 2) == "--" then
      M.usage_error(("--%s: no value, wanted %s"):format(key.name, limits.wanted(key)))
    end
  end
  local value = convert(key, text)
  if value == nil then
    M.usage_error(("--%s: got %q, wanted %s"):format(key.name, text, limits.wanted(key)))
  end
  return value, i
end

--- Refuses a given key that the others leave without effect.
---@param keys liger.Key[]
---@param values table<string, any>
---@param given table<string, boolean>
function M.refuse_unread(keys, values, given)
  local ranges, defaults = {}, {}
  for _, key in ipairs(keys) do
    ranges[key.name], defaults[key.name] = key.allow, key.default
  end
  local problem = limits.unread(defaults, ranges, values, given)
  if problem then
    M.usage_error("--" .. problem)
  end
end

--- Reads `--key value`, `--key=value`, `--flag` and `--no-flag`. Whatever is wrong is a usage error
--- that names the key.
---@param keys liger.Key[]
---@param args string[]
---@param max_words? integer  words that may stand without a key (0)
---@return table<string, any> values  the defaults with what was given
---@return string[] words
---@return boolean help  --help or -h was given; nothing after it was looked at
---@return table<string, boolean> given  the keys that were said
function M.parse(keys, args, max_words)
  M.prepare(keys)
  max_words = max_words or 0
  local by_name, names = index_of(keys)
  local values, words, given = {}, {}, {}
  for _, key in ipairs(keys) do
    values[key.name] = key.default
  end
  local i, only_words = 1, false
  while args[i] do
    local arg = args[i]
    i = i + 1
    if only_words or arg == "-" or arg:sub(1, 1) ~= "-" then
      words[#words + 1] = arg
      if #words > max_words then
        M.usage_error(("%s: unexpected word; options are --key value"):format(arg))
      end
    elseif arg == "--" then
      only_words = true
    elseif arg == "--help" or arg == "-h" then
      return values, words, true, given
    else
      local name, text = arg:match("^%-%-([^=]+)=(.*)$")
      name = name or arg:match("^%-%-(.+)$")
      if not name then
        M.usage_error(("%s: unknown option; options are --key value"):format(arg))
      end
      local key, denied = find(by_name, name)
      if not key then
        unknown(name, names)
      elseif given[key.name] then
        M.usage_error(("--%s: given twice"):format(key.name))
      elseif denied and text then
        M.usage_error(("--%s: got %q, wanted no value"):format(name, text))
      end
      given[key.name] = true
      if denied then
        values[key.name] = false
      else
        values[key.name], i = value_of(key, text, args, i, max_words == 0)
        if plain(name):find("^per_device_") then
          values[key.name] = values[key.name] * device.size -- the key counts all processes
        end
      end
    end
  end
  M.refuse_unread(keys, values, given)
  return values, words, false, given
end

-- ---- help ----

local function shown_default(key)
  local default = key.default
  if key.show then
    return key.show
  elseif default == false and key.kind ~= "boolean" then
    return "none"
  elseif default == "" then
    return '""'
  elseif type(default) == "number" then
    return (("%.14g"):format(default):gsub("e([+-])0+", "e%1"))
  end
  return tostring(default)
end

--- The keys in three columns: option, default, comment.
---@param keys liger.Key[]
---@return string
function M.columns(keys)
  M.prepare(keys)
  local left, middle, widest, wide = {}, {}, 0, 0
  for i, key in ipairs(keys) do
    left[i], middle[i] = "--" .. key.name, shown_default(key)
    widest, wide = math.max(widest, #left[i]), math.max(wide, #middle[i])
  end
  local lines = {}
  for i, key in ipairs(keys) do
    local form = "  %-" .. widest .. "s  %-" .. wide .. "s  %s"
    lines[i] = form:format(left[i], middle[i], key.comment or ""):gsub("%s+$", "") .. "\n"
  end
  return table.concat(lines)
end

return M
