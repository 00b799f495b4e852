-- The folder RUN/checkpoint-N of a run after step N: the model as a Hugging Face folder, which
-- loads with --model, NAME.safetensors of what else has tensors, trainer_state.json, and
-- manifest.json with every file's size and checksum. It is written under another name, the manifest
-- last, synced and renamed: what has its name and agrees with its manifest is whole.
local cjson = require("cjson")
local ffi = require("ffi")
local files = require("liger.file")
local json = require("liger.data.json")
local lib = require("liger.ffi")

local M = {}

local STATE, MANIFEST = "trainer_state.json", "manifest.json"

-- ---- reading ----

-- The value of a JSON file, or nil and what is wrong with it.
local function read_json(folder, name)
  local text = files.read(folder .. "/" .. name)
  if not text then
    return nil, name .. " is missing"
  end
  local ok, value = pcall(cjson.decode, text)
  if not ok or type(value) ~= "table" then
    return nil, name .. " is no JSON object"
  end
  return value
end

--- What is wrong with a checkpoint: a file that is missing or has other bytes than were written.
---@param folder string
---@return string|nil  nil: it is whole
function M.problem(folder)
  local manifest, message = read_json(folder, MANIFEST)
  if not manifest or type(manifest.files) ~= "table" then
    return message or MANIFEST .. " lists no files"
  end
  local names = {}
  for name in pairs(manifest.files) do
    names[#names + 1] = name
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local path, wanted = folder .. "/" .. name, manifest.files[name]
    local info = files.stat(path)
    if not info then
      return name .. " is missing"
    elseif info.bytes ~= wanted.bytes then
      return ("%s is %d bytes, wanted %d"):format(name, info.bytes, wanted.bytes)
    end
  end
  for _, name in ipairs(names) do
    local sum, why = files.checksum(folder .. "/" .. name)
    if sum ~= manifest.files[name].xxh64 then
      return name .. (why and " cannot be read: " .. why or " has other bytes than were written")
    end
  end
end

--- The checkpoints of a run, the newest first.
---@param run string  folder
---@return { folder: string, step: integer }[]
function M.list(run)
  local list = {}
  for _, name in ipairs(files.list(run)) do
    local step = tonumber(name:match("^checkpoint%-(%d+)$"))
    if step then
      list[#list + 1] = { folder = run .. "/" .. name, step = step }
    end
  end
  table.sort(list, function(a, b)
    return a.step > b.step
  end)
  return list
end

--- The newest whole checkpoint of a run, and those that are newer and broken.
---@param run string
---@return string|nil folder
---@return { folder: string, problem: string }[] broken
function M.newest(run)
  local broken = {}
  for _, c in ipairs(M.list(run)) do
    local problem = M.problem(c.folder)
    if not problem then
      return c.folder, broken
    end
    broken[#broken + 1] = { folder = c.folder, problem = problem }
  end
  return nil, broken
end

--- The state that write() was given.
---@param folder string
---@return table
function M.state(folder)
  local state, message = read_json(folder, STATE)
  if not state then
    error(("%s: %s"):format(folder, message), 0)
  end
  return state
end

--- Fills tensors from the file of that name.
---@param folder string
---@param name string
---@param named { name: string, tensor: liger.Tensor }[]
function M.read_tensors(folder, name, named)
  local weights = require("liger.model.weights")
  local path = ("%s/%s.safetensors"):format(folder, name)
  local index = weights.index({ { path = path, file = weights.open(path) } })
  for _, entry in ipairs(named) do
    local found = index[entry.name]
    if not found then
      error(("%s: tensor %s is missing"):format(path, entry.name), 0)
    end
    weights.read(found, entry.name, entry.tensor)
  end
end

-- ---- writing ----

local function write_manifest(folder)
  local list = {}
  for _, name in ipairs(files.list(folder)) do
    local path = folder .. "/" .. name
    local sum, why = files.checksum(path)
    if not sum then
      error(("%s: cannot be read back: %s"):format(path, why), 0)
    end
    list[name] = { bytes = files.stat(path).bytes, xxh64 = sum }
  end
  files.write(folder .. "/" .. MANIFEST, json.encode({ files = list }) .. "\n")
end

-- A broken checkpoint that has the name keeps its files under another.
local function set_aside(folder)
  if files.stat(folder) then
    local name, number = folder .. ".broken", 1
    while files.stat(name) do
      number = number + 1
      name = ("%s.broken-%d"):format(folder, number)
    end
    files.rename_folder(folder, name)
  end
end

--- Writes a checkpoint.
---@param run string  folder
---@param step integer
---@param content { state: table, model?: liger.Decoder, tokenizer?: liger.Tokenizer,
---   tensors: table<string, table> }  tensors by the name of their file
---@return string folder
function M.write(run, step, content)
  local folder = ("%s/checkpoint-%d"):format(run, step)
  local part = folder .. ".part"
  files.remove_folder(part)
  local code = lib.C.lg_sys_make_folders(part)
  if code ~= 0 then
    error(("%s: cannot be made: %s"):format(part, ffi.string(lib.C.lg_sys_error(code))), 0)
  end
  if content.model then
    require("liger.model").save(content.model, part, content.tokenizer)
  end
  for name, named in pairs(content.tensors) do
    require("liger.model.weights").write(("%s/%s.safetensors"):format(part, name), named)
  end
  files.write(part .. "/" .. STATE, json.encode(content.state) .. "\n")
  write_manifest(part)
  set_aside(folder)
  files.rename_folder(part, folder)
  return folder
end

--- Removes the oldest checkpoints but `limit`. Those without a manifest, and what is newer than
--- `step`, stay and do not count.
---@param run string
---@param step integer   of the one just written
---@param limit integer  0: all stay
function M.prune(run, step, limit)
  local kept = 0
  for _, c in ipairs(M.list(run)) do
    if limit > 0 and c.step <= step and files.stat(c.folder .. "/" .. MANIFEST) then
      kept = kept + 1
      if kept > limit then
        files.remove_folder(c.folder, MANIFEST)
      end
    end
  end
end

return M
