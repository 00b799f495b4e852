-- The paged key/value cache: a tensor pair a layer, pages handed out from a free list and counted,
-- since the sequences of one prompt share its full pages.
local lib = require("liger.ffi")
local memory = require("liger.memory")
local Tensor = require("liger.tensor")

local Cache = {}
Cache.__index = Cache

local M = { page_size = 16 }

--- A cache of `pages` pages for a decoder of this shape.
---@param shape table   layers, kv_heads, head_dim
---@param dtype string
---@param pages integer
function M.new(shape, dtype, pages)
  local self = setmetatable({ k = {}, v = {}, free = {}, uses = {} }, Cache)
  local size = { pages * M.page_size, shape.kv_heads, shape.head_dim }
  for i = 1, shape.layers do
    self.k[i], self.v[i] = Tensor.empty(size, dtype), Tensor.empty(size, dtype)
    memory.claim(self.k[i].storage, "KV cache")
    memory.claim(self.v[i].storage, "KV cache")
  end
  -- The lowest page is taken first.
  for page = pages - 1, 0, -1 do
    self.free[#self.free + 1] = page
  end
  return self
end

--- Bytes of one page over all layers.
function M.page_bytes(shape, dtype)
  local numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim * M.page_size
  return numbers * Tensor.dtype_bytes[dtype]
end

--- Takes a page; raises when none is left, which admission prevents.
---@return integer
function Cache:take()
  local page = self.free[#self.free]
  if not page then
    lib.raise("cache: no page is free")
  end
  self.free[#self.free] = nil
  self.uses[page] = 1
  return page
end

--- One more sequence reads this page.
function Cache:share(page)
  self.uses[page] = self.uses[page] + 1
end

--- One sequence less; the last one frees it.
function Cache:drop(page)
  self.uses[page] = self.uses[page] - 1
  if self.uses[page] == 0 then
    self.free[#self.free + 1] = page
  end
end

return M
