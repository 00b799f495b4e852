-- Weights between files and a decoder: safetensors folders in and out, GGUF in. Every weight of the
-- decoder must be in the files once, with its shape; what the files hold beyond that is named.
local ffi = require("ffi")
local fail = require("liger.file").fail
local lib = require("liger.ffi")
local Tensor = require("liger.tensor")

local C = lib.C

local M = {}

--- Opens a tensor file; raises with the file's name and what is wrong.
---@param path string
---@return ffi.cdata* file  closed by the collector
function M.open(path)
  local out = ffi.new("lg_file *[1]")
  lib.check_file(C.lg_file_open(lib.ctx, path, out))
  return ffi.gc(out[0], C.lg_file_close)
end

--- The tensors of open files by name.
---@param files { path: string, file: ffi.cdata* }[]
---@return table<string, { path: string, file: ffi.cdata*, index: integer, shape: integer[], type:
---   string }>
function M.index(files)
  local index = {}
  for _, f in ipairs(files) do
    for i = 0, tonumber(C.lg_file_num_tensors(f.file)) - 1 do
      local t = C.lg_file_tensor_at(f.file, i)
      local name, shape = ffi.string(t.name), {}
      for d = 1, t.ndim do
        shape[d] = tonumber(t.shape[d - 1])
      end
      if index[name] then
        fail(f.path, "tensor %s is in %s too", name, index[name].path)
      end
      index[name] = {
        path = f.path, file = f.file, index = i, shape = shape, type = ffi.string(t.type),
      }
    end
  end
  return index
end

--- Reads one tensor into a dense one of the same shape.
function M.read(entry, name, y)
  local got, wanted = Tensor.shape_text(entry.shape), Tensor.shape_text(y.shape)
  if got ~= wanted then
    fail(entry.path, "tensor %s is %s, wanted %s as the config says", name, got, wanted)
  end
  local t = C.lg_file_tensor_at(entry.file, entry.index)
  if t.dtype == y.raw.dtype and y:is_contiguous() then
    lib.check(C.lg_upload(lib.ctx, t.data, Tensor.to_write(y)))
    return
  elseif lib.on_cpu then
    lib.check_file(C.lg_file_read(lib.ctx, entry.file, entry.index, y.raw))
    return
  end
  local host = M.on_host(y)
  lib.check_file(C.lg_file_read(lib.ctx, entry.file, entry.index, host.raw))
  lib.check(C.lg_upload(lib.ctx, host.raw.data, y.raw))
end

--- A dense tensor like y in the host's memory, its values not set.
---@param y liger.Tensor
---@return liger.Tensor
function M.on_host(y)
  local bytes = ffi.new("char[?]", math.max(y:numel() * Tensor.dtype_bytes[y.dtype], 1))
  return Tensor.foreign(bytes, y.shape, y.dtype, bytes)
end

-- With tied embeddings a file holds either name.
local TIED = { "model.embed_tokens.weight", "lm_head.weight" }

--- Fills a decoder from an index of tensors under Hugging Face names.
---@param model liger.Decoder
---@param index table    from index()
---@param path string    for messages
---@param rename? fun(name: string): string      the file's name of a weight
---@param rearrange? fun(name: string, y: liger.Tensor)  mends the order of rows after the read
function M.load(model, index, path, rename, rearrange)
  rename = rename or function(name)
    return name
  end
  local used = {}
  for _, w in ipairs(model:named_weights()) do
    local name = rename(w.name)
    if not index[name] and model.shape.tied and w.name == TIED[1] then
      name = rename(TIED[2])
    end
    local entry = index[name]
    if not entry then
      fail(path, "tensor %s is missing", rename(w.name))
    end
    M.read(entry, name, w.tensor)
    if rearrange then
      rearrange(w.name, w.tensor)
    end
    used[name] = true
  end
  if model.shape.tied then
    used[rename(TIED[1])], used[rename(TIED[2])] = true, true
  end
  for name, entry in pairs(index) do
    -- Old exports keep the frequencies; the config has them.
    if not used[name] and not name:find("rotary_emb%.inv_freq$") then
      fail(entry.path, "tensor %s is in the file and not in the model", name)
    end
  end
end

--- Writes tensors to one safetensors file; it appears whole or not at all.
---@param path string
---@param named { name: string, tensor: liger.Tensor }[]
function M.write(path, named)
  local names = ffi.new("const char *[?]", #named)
  local tensors = ffi.new("const lg_tensor *[?]", #named)
  for i, entry in ipairs(named) do
    names[i - 1], tensors[i - 1] = entry.name, entry.tensor:upload().raw
  end
  lib.check_file(C.lg_safetensors_write(lib.ctx, path, names, tensors, #named, '{"format":"pt"}'))
end

--- Writes all weights to one safetensors file.
---@param model liger.Decoder
---@param path string
function M.save(model, path)
  M.write(path, model:named_weights())
end

return M
