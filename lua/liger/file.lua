-- Files that appear whole or not at all, and those that hold a function.
local ffi = require("ffi")
local lib = require("liger.ffi")

local M = {}

-- io's messages begin with the path; what is left is the reason.
local function reason(message, path)
  local text = message or "unknown error"
  return text:sub(1, #path + 2) == path .. ": " and text:sub(#path + 3) or text
end

--- Writes a file: beside it first, down to the disk, then under its name.
---@param path string
---@param text string
function M.write(path, text)
  local part = path .. ".part"
  local file, message = io.open(part, "wb")
  local done = file
  if file then
    done, message = file:write(text)
    local closed, why = file:close()
    done, message = done and closed, message or why
  end
  local code = done and lib.C.lg_sys_sync(part) or 0
  if code ~= 0 then
    done, message = false, ffi.string(lib.C.lg_sys_error(code))
  elseif done then
    done, message = os.rename(part, path)
  end
  if not done then
    os.remove(part)
    error(("%s: cannot be written: %s"):format(path, reason(message, part)), 0)
  end
end

--- The function that a Lua file returns.
---@param path string
---@param wanted string  what it takes, for the message
---@return function|nil
---@return string|nil message
function M.load_function(path, wanted)
  local chunk, message = loadfile(path)
  if not chunk then
    return nil, message
  end
  local value = chunk()
  if type(value) ~= "function" then
    return nil, ("%s returned %s, wanted a %s"):format(path, type(value), wanted)
  end
  return value
end

--- Makes a folder and those above it, and sees that files can be made in it.
---@param folder string
---@return boolean|nil ok
---@return string|nil message  why not
function M.probe_folder(folder)
  local code = lib.C.lg_sys_make_folders(folder)
  if code ~= 0 then
    return nil, ("%s: cannot be made: %s"):format(folder, ffi.string(lib.C.lg_sys_error(code)))
  end
  local path = folder .. "/.liger-probe"
  local file, message = io.open(path, "wb")
  if not file then
    return nil, ("%s: cannot be written to: %s"):format(folder, reason(message, path))
  end
  file:close()
  os.remove(path)
  return true
end

return M
