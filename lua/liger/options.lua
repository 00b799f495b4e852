-- A function's options: a table of defaults, overridden by the caller's.
local lib = require("liger.ffi")

--- The defaults, overridden; false becomes nil. Raises on an unknown key.
---@param op string       named in the message
---@param defaults table
---@param options? table
---@return table
return function(op, defaults, options)
  local o = {}
  for key, value in pairs(defaults) do
    o[key] = value or nil
  end
  for key, value in pairs(options or {}) do
    if defaults[key] == nil then
      lib.raise(("%s: unknown option %s"):format(op, tostring(key)))
    end
    o[key] = value or nil
  end
  return o
end
