-- Writes JSON the same way every time: keys sorted, the shortest number that reads back the same,
-- one line. Reading is cjson's.
local M = {}

local escapes = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }

local function escape(c)
  return escapes[c] or ("\\u%04x"):format(c:byte())
end

-- Length of the UTF-8 sequence at byte i, or nil where there is none.
local function sequence_length(s, i)
  local a, b = s:byte(i, i + 1)
  if a < 0x80 then
    return 1
  elseif a < 0xC2 or a > 0xF4 then
    return nil
  end
  local n = a < 0xE0 and 2 or a < 0xF0 and 3 or 4
  local low = a == 0xE0 and 0xA0 or a == 0xF0 and 0x90 or 0x80
  local high = a == 0xED and 0x9F or a == 0xF4 and 0x8F or 0xBF
  if not b or b < low or b > high or not s:match("^" .. ("[\128-\191]"):rep(n - 1), i + 1) then
    return nil
  end
  return n
end

-- Bytes that are no UTF-8 become U+FFFD, so that a line can always be read.
local function valid_utf8(s)
  if not s:find("[\128-\255]") then
    return s
  end
  local out, i = {}, 1
  while i <= #s do
    local n = sequence_length(s, i)
    out[#out + 1] = n and s:sub(i, i + n - 1) or "\239\191\189"
    i = i + (n or 1)
  end
  return table.concat(out)
end

local function number_text(x, digits)
  if x ~= x then
    return '"nan"'
  elseif x == math.huge then
    return '"inf"'
  elseif x == -math.huge then
    return '"-inf"'
  elseif x % 1 == 0 and math.abs(x) < 2 ^ 53 then
    return ("%d"):format(x)
  end
  for n = digits or 15, digits or 17 do
    local text = ("%." .. n .. "g"):format(x)
    if digits or tonumber(text) == x then
      return text
    end
  end
end

local function key_text(key)
  return '"' .. valid_utf8(tostring(key)):gsub('[%c"\\]', escape) .. '":'
end

local function write(out, value, digits)
  local kind = type(value)
  if kind == "number" then
    out[#out + 1] = number_text(value, digits)
  elseif kind == "string" then
    out[#out + 1] = '"' .. valid_utf8(value):gsub('[%c"\\]', escape) .. '"'
  elseif kind == "boolean" then
    out[#out + 1] = tostring(value)
  elseif kind ~= "table" then
    if kind ~= "userdata" then
      error(("json: cannot write a %s"):format(kind), 0)
    end
    out[#out + 1] = "null" -- cjson's null
  elseif #value > 0 or next(value) == nil then
    out[#out + 1] = "["
    for i = 1, #value do
      out[#out + 1] = i > 1 and "," or nil
      write(out, value[i], digits)
    end
    out[#out + 1] = "]"
  else
    local keys = {}
    for key in pairs(value) do
      keys[#keys + 1] = key
    end
    table.sort(keys, function(a, b)
      return tostring(a) < tostring(b)
    end)
    out[#out + 1] = "{"
    for i, key in ipairs(keys) do
      out[#out + 1] = (i > 1 and "," or "") .. key_text(key)
      write(out, value[key], digits)
    end
    out[#out + 1] = "}"
  end
end

--- One line of JSON. A table with a first entry is a list, an empty one too; NaN and infinities
--- become "nan", "inf", "-inf".
---@param value any
---@param digits? integer  significant digits of numbers (nil: enough to read back the same)
---@return string
function M.encode(value, digits)
  local out = {}
  write(out, value, digits)
  return table.concat(out)
end

return M
