-- Gradient buffers: where a backward writes an edge's gradient, how several parts of one add up,
-- and when a buffer may go. The edges and their three kinds are autograd.lua's.
--
-- Buffers may be shared by several edges (an add passes one on to both sides); storage.holds counts
-- them, and only a buffer held once is written to.
local lib = require("liger.ffi")
local memory = require("liger.memory")
local Tensor = require("liger.tensor")

local C, ctx, check = lib.C, lib.ctx, lib.check

local M = {}

-- Gradient dtype: sums run in fp32 for bf16 weights.
local function grad_dtype(dtype)
  return dtype == "f64" and "f64" or "f32"
end

--- A gradient buffer, held once. Its life is that of its holds, whatever scope the walk runs in.
local function new_grad(shape, dtype)
  local t = Tensor.empty(shape, dtype):keep()
  t.storage.holds = 1
  return t
end

M.new = new_grad

--- Ends one hold of a buffer; the last one frees it.
local function drop(t)
  local storage = t.storage
  if storage.holds then
    storage.holds = storage.holds - 1
    if storage.holds <= 0 then
      memory.release(storage)
    end
  end
end

local function zero(t)
  check(C.lg_fill(ctx, 0, Tensor.to_write(t)))
end

local function add_to(x, y)
  check(C.lg_accumulate(ctx, x.raw, Tensor.to_write(y)))
end

-- The part of the base's gradient buffer that belongs to a view.
local function part_of(edge, buffer)
  if edge.whole then
    local strides
    if not buffer:is_contiguous() then
      strides = { tonumber(buffer.raw.stride[0]), edge.shape[#edge.shape], 1 }
    end
    return Tensor.view_of(buffer, 0, edge.shape, strides)
  end
  return buffer:narrow(edge.dim, edge.start, edge.length)
end

-- Zeroes what no view has written, so that the buffer can be read or added to.
local function complete(edge)
  local parts = edge.parts
  if not parts then
    return
  end
  edge.parts = nil
  table.sort(parts, function(a, b)
    return a.start < b.start
  end)
  local dim, at = parts[1].dim, 1
  local function zero_until(stop)
    if stop > at then
      zero(edge.grad:narrow(dim, at, stop - at))
    end
  end
  for _, part in ipairs(parts) do
    zero_until(part.start)
    at = math.max(at, part.start + part.length)
  end
  zero_until(edge.shape[dim] + 1)
end

local function overlaps(parts, edge)
  for _, part in ipairs(parts) do
    if part.dim ~= edge.dim then
      return true
    end
    if part.start < edge.start + edge.length and edge.start < part.start + part.length then
      return true
    end
  end
  return false
end

--- The buffer of a leaf's gradient, made where there is none.
---@param leaf liger.Tensor
---@return liger.Tensor
---@return boolean made  and not initialised
function M.of_leaf(leaf)
  if leaf.grad then
    return leaf.grad, false
  end
  leaf.grad = Tensor.empty(leaf.shape, grad_dtype(leaf.dtype)):keep()
  memory.claim(leaf.grad.storage, "gradients")
  return leaf.grad, true
end

local target

-- Where a view writes its gradient: a tensor and whether what lies there must be added to.
local function view_target(edge)
  local base = edge.base
  if edge.whole then
    local buffer, add = target(base)
    return part_of(edge, buffer), add
  end
  if base.leaf or base.base then
    -- Into a defined buffer, by adding.
    local buffer, add = target(base)
    if not add then
      zero(buffer)
    end
    return part_of(edge, buffer), true
  end
  if not base.grad then
    base.grad = new_grad(base.shape, base.dtype)
    base.parts = {}
  end
  if base.parts and not overlaps(base.parts, edge) then
    base.parts[#base.parts + 1] = edge
    return part_of(edge, base.grad), false
  end
  local buffer = target(base)
  return part_of(edge, buffer), true
end

-- The buffer of an edge's gradient, writable, and whether it already holds a part of the sum.
target = function(edge)
  if edge.leaf then
    local grad, made = M.of_leaf(edge.leaf)
    Tensor.to_write(grad) -- may be the user's own
    return grad, not made
  elseif edge.base then
    return view_target(edge)
  end
  local grad = edge.grad
  if not grad then
    edge.grad = new_grad(edge.shape, edge.dtype)
    return edge.grad, false
  end
  complete(edge)
  if grad.storage.holds > 1 then
    local own = new_grad(edge.shape, edge.dtype)
    check(C.lg_copy(ctx, grad.raw, own.raw))
    drop(grad)
    edge.grad = own
  end
  return edge.grad, true
end

M.drop = drop

--- Where a backward op writes the gradient of an input, overwriting. The second value is true when
--- `settle` must follow.
---@param edge liger.Edge|false
---@param strided boolean  the op can write rows with a stride
function M.dest(edge, strided)
  if not edge then
    return nil, false
  end
  if not edge.leaf and not edge.base and not edge.grad then
    edge.grad = new_grad(edge.shape, edge.dtype)
    return edge.grad, false
  end
  -- An op that has the same view twice asks twice: the first answer stands until it is settled.
  if edge.base and not edge.target then
    local part, add = view_target(edge)
    if not add and part.dtype == edge.dtype and (strided or part:is_contiguous()) then
      return part, false
    end
    edge.target, edge.target_add = part, add
  end
  return new_grad(edge.shape, edge.dtype), true
end

--- Adds a gradient that `dest` could not place directly, and frees it.
function M.settle(edge, grad)
  if edge.base then
    local part, add = edge.target, edge.target_add
    if not part then
      part, add = view_target(edge)
    end
    edge.target, edge.target_add = nil, nil
    if add then
      add_to(grad, part)
    else
      part:copy_(grad)
    end
    drop(grad)
    return
  end
  if not edge.leaf and edge.grad and edge.grad.storage.holds > 1 and grad.dtype == edge.dtype then
    -- What has arrived is shared: add it to the new buffer instead of copying it.
    complete(edge)
    add_to(edge.grad, grad)
    drop(edge.grad)
    edge.grad = grad
    return
  end
  local buffer, add = target(edge)
  if add then
    add_to(grad, buffer)
  else
    buffer:copy_(grad)
  end
  drop(grad)
end

--- Where a backward op adds a weight's gradient: the leaf's own buffer.
function M.sum_dest(edge)
  if not edge then
    return nil, false
  end
  if edge.leaf then
    local buffer, add = target(edge)
    if not add then
      zero(buffer)
    end
    return buffer, false
  end
  if edge.base and not edge.target then
    local part, add = view_target(edge)
    if edge.base.leaf and part:is_contiguous() then
      if not add then
        zero(part)
      end
      return part, false
    end
    edge.target, edge.target_add = part, add
  end
  local grad = new_grad(edge.shape, grad_dtype(edge.dtype))
  zero(grad)
  return grad, true
end

--- Passes a gradient on without a copy; several edges may share it.
---@param edge liger.Edge|false
---@param grad liger.Tensor  dense
function M.give(edge, grad)
  if not edge then
    return
  end
  if not edge.leaf and not edge.base and not edge.grad then
    edge.grad = grad:keep()
    grad.storage.holds = (grad.storage.holds or 0) + 1
    return
  end
  local buffer, add = target(edge)
  if add then
    add_to(grad, buffer)
  else
    buffer:copy_(grad)
  end
end

--- The gradient that has arrived at a node's output, complete and dense; zeros when none has and
--- `needed`.
function M.incoming(edge, needed)
  if edge.grad then
    complete(edge)
    return edge.grad
  end
  if needed then
    edge.grad = new_grad(edge.shape, edge.dtype)
    zero(edge.grad)
    return edge.grad
  end
  return nil
end

return M
