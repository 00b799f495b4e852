-- Files that appear whole or not at all, those that hold a function, and folders.
local ffi = require("ffi")
local lib = require("liger.ffi")

local M = {}

-- io's messages begin with the path; what is left is the reason.
local function reason(message, path)
  local text = message or "unknown error"
  return text:sub(1, #path + 2) == path .. ": " and text:sub(#path + 3) or text
end

--- Raises what is wrong with a file or folder, without a line of Lua.
---@param path string
---@param text string  printf-style, with `...`
function M.fail(path, text, ...)
  error(("%s: %s"):format(path, text:format(...)), 0)
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

--- The text of a file.
---@param path string
---@return string|nil  nil: it cannot be read
function M.read(path)
  local file = io.open(path, "rb")
  local text = file and file:read("*a")
  if file then
    file:close()
  end
  return text
end

--- What is at a path.
---@param path string
---@return { bytes: number, is_folder: boolean }|nil
function M.stat(path)
  local info = ffi.new("lg_sys_info")
  if lib.C.lg_sys_stat(path, info) ~= 0 then
    return nil
  end
  return { bytes = info.bytes, is_folder = info.is_folder }
end

--- The names in a folder, sorted; none where it cannot be read.
---@param folder string
---@return string[]
function M.list(folder)
  local names, open = {}, lib.C.lg_sys_folder_open(folder)
  local name = lib.C.lg_sys_folder_next(open)
  while name ~= nil do
    names[#names + 1] = ffi.string(name)
    name = lib.C.lg_sys_folder_next(open)
  end
  lib.C.lg_sys_folder_close(open)
  table.sort(names)
  return names
end

--- XXH64 of a file's bytes in hexadecimal digits.
---@param path string
---@return string|nil
---@return string|nil message
function M.checksum(path)
  local digits = ffi.new("char[17]")
  local code = lib.C.lg_sys_checksum(path, digits)
  if code ~= 0 then
    return nil, ffi.string(lib.C.lg_sys_error(code))
  end
  return ffi.string(digits)
end

--- Removes a folder of files; one of its names goes first. No error where there is none.
---@param folder string
---@param first? string
function M.remove_folder(folder, first)
  if first then
    os.remove(folder .. "/" .. first)
  end
  for _, name in ipairs(M.list(folder)) do
    os.remove(folder .. "/" .. name)
  end
  os.remove(folder)
end

--- Gives a folder its name for good: it is on the disk under it when this returns.
---@param from string
---@param to string
function M.rename_folder(from, to)
  local above = to:match("^(.*)/[^/]+$") or "."
  for _, step in ipairs({
    function()
      return lib.C.lg_sys_sync(from)
    end,
    function()
      local ok, _, code = os.rename(from, to)
      return ok and 0 or code
    end,
    function()
      return lib.C.lg_sys_sync(above)
    end,
  }) do
    local code = step()
    if code ~= 0 then
      local why = ffi.string(lib.C.lg_sys_error(code))
      error(("%s: cannot be renamed to %s: %s"):format(from, to, why), 0)
    end
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
