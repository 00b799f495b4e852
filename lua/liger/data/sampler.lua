-- Order of the data: every row once an epoch, in an order that (seed, epoch) alone decides.
local ffi = require("ffi")
local lib = require("liger.ffi")

local Sampler = {}
Sampler.__index = Sampler

local M = {}

-- Streams of the data's random numbers lie far from those of weights and sampling.
local STREAM = 2 ^ 40

--- A shuffled copy of a list: Fisher-Yates with the Philox stream (seed, stream).
---@generic T
---@param list T[]
---@param seed integer
---@param stream? integer
---@return T[]
function M.shuffle(list, seed, stream)
  local n = #list
  local words = ffi.new("uint32_t[?]", math.max(n, 1))
  lib.C.lg_philox(seed, STREAM + (stream or 0), 0, n, words)
  local y = {}
  for i = 1, n do
    y[i] = list[i]
  end
  for i = n, 2, -1 do
    local j = math.floor(words[i - 1] / 2 ^ 32 * i) + 1
    y[i], y[j] = y[j], y[i]
  end
  return y
end

--- Endless rows in epochs.
---@param rows table[]
---@param seed integer
---@param shuffle? boolean  default true
function M.new(rows, seed, shuffle)
  if #rows == 0 then
    lib.raise("data: there are no rows")
  end
  return setmetatable(
    { rows = rows, seed = seed, shuffled = shuffle ~= false, epoch = 0, at = 0, drawn = 0 }, Sampler
  )
end

local function start_epoch(self)
  self.epoch = self.epoch + 1
  self.order = self.shuffled and M.shuffle(self.rows, self.seed, self.epoch) or self.rows
  self.at = 0
end

--- What a checkpoint holds of it.
---@return { epoch: integer, at: integer, drawn: integer, rows: integer }
function Sampler:state()
  return { epoch = self.epoch, at = self.at, drawn = self.drawn, rows = #self.rows }
end

--- Goes on from state(), over the same rows.
---@param state table
function Sampler:set_state(state)
  if state.rows ~= #self.rows then
    lib.raise(
      ("data: the rows are %d, wanted %d as in the checkpoint"):format(#self.rows, state.rows)
    )
  end
  self.epoch, self.drawn = state.epoch - 1, state.drawn
  if state.epoch == 0 then
    self.epoch, self.order, self.at = 0, nil, 0
  else
    start_epoch(self)
    self.at = state.at
  end
end

--- The next n rows; an epoch's end is crossed without a gap.
---@param n integer
---@return table[]
function Sampler:next(n)
  local batch = {}
  for i = 1, n do
    if not self.order or self.at == #self.order then
      start_epoch(self)
    end
    self.at = self.at + 1
    batch[i] = self.order[self.at]
  end
  self.drawn = self.drawn + n
  return batch
end

--- Epochs drawn so far, a fraction.
---@return number
function Sampler:epochs()
  return self.drawn / #self.rows
end

return M
