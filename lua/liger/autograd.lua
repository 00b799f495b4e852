-- The tape: which op made a tensor, and the walk back from a loss. The rules come from ops.h by way
-- of ops.lua; this file knows edges, nodes and how gradients add up.
--
-- An edge stands for one tensor's gradient. Three kinds:
--   leaf     gathers into leaf.grad
--   base     a view: its gradient is a part of the base edge's gradient, written in place there
--   others   made by a node; edge.grad holds what has arrived so far
-- Gradient buffers may be shared by several edges (an add passes one on to both sides);
-- storage.holds counts them, and only a buffer held once is written to.
local lib = require("liger.ffi")
local memory = require("liger.memory")
local Tensor = require("liger.tensor")

local C, ctx, check = lib.C, lib.ctx, lib.check

local M = { rules = {} }

local state = { recording = true }
M.state = state

local last_id = 0

---@class liger.Edge
---@field shape integer[]
---@field dtype string
---@field leaf? liger.Tensor
---@field base? liger.Edge
---@field node? liger.Node
---@field grad? liger.Tensor

---@class liger.Node
---@field id integer        rises with creation, so falling ids are a reverse topological order
---@field run function      backward
---@field freed? boolean

--- A node over the edges of its inputs (false: that input needs no gradient). The table given
--- becomes the node.
function M.new_node(run, edges)
  last_id = last_id + 1
  edges.id = last_id
  edges.n = #edges
  edges.outputs = {}
  edges.run = run
  return edges
end

--- Makes t an output of node.
function M.new_edge(node, t)
  local edge = { node = node, shape = t.shape, dtype = t.dtype }
  node.outputs[#node.outputs + 1] = edge
  t.edge = edge
  t.requires_grad = true
  return edge
end

-- ---- leaves and views ----

local methods = Tensor.methods

local function is_float(dtype)
  return dtype == "f32" or dtype == "bf16" or dtype == "f64" or dtype == "f16"
end

--- Gradients of this tensor are wanted: they add up in `.grad`.
---@return liger.Tensor self
function methods:requires_grad_()
  if not is_float(self.dtype) then
    lib.raise(("requires_grad_: tensor is %s, wanted a float dtype"):format(self.dtype))
  end
  if self.edge and not self.edge.leaf then
    lib.raise("requires_grad_: tensor is the result of an op; detach() it first")
  end
  self.requires_grad = true
  self.edge = self.edge or { leaf = self, shape = self.shape, dtype = self.dtype }
  return self
end

--- The same data without its history.
---@return liger.Tensor
function methods:detach()
  local strides = {}
  for i = 1, #self.shape do
    strides[i] = tonumber(self.raw.stride[i - 1])
  end
  return Tensor.view_of(self, 0, self.shape, strides)
end

-- Gradient dtype: sums run in fp32 for bf16 weights.
local function grad_dtype(dtype)
  return dtype == "f64" and "f64" or "f32"
end

local function link_view(t, view, where)
  if state.recording and t.edge then
    where.base, where.shape, where.dtype = t.edge, view.shape, view.dtype
    view.edge, view.requires_grad = where, true
  end
  return view
end

--- The same elements under another shape. Needs a dense tensor.
---@param ... integer  sizes; one may be -1
---@return liger.Tensor
function methods:reshape(...)
  local shape, n, free = { ... }, 1, nil
  for i, size in ipairs(shape) do
    if size == -1 and not free then
      free = i
    elseif type(size) ~= "number" or size < 0 or size % 1 ~= 0 then
      lib.raise(
        ("reshape: size %d is %s, wanted a whole number, or -1 once"):format(i, tostring(size))
      )
    else
      n = n * size
    end
  end
  local total = self:numel()
  if free then
    shape[free] = n > 0 and total / n or 0
    n = n * shape[free]
  end
  if n ~= total or (free and shape[free] % 1 ~= 0) then
    lib.raise(
      ("reshape: tensor is %s, wanted %d elements for the new shape"):format(
        Tensor.shape_text(self.shape), n
      )
    )
  end
  -- Splitting or joining the last dimension keeps the row stride, so strided rows may pass too.
  local strides
  if not self:is_contiguous() then
    local last = #self.shape
    local width = self.shape[last]
    if last ~= 2 or #shape ~= 3 or shape[1] ~= self.shape[1] or shape[2] * shape[3] ~= width then
      lib.raise("reshape: tensor is not contiguous; call contiguous() first")
    end
    strides = { tonumber(self.raw.stride[0]), shape[3], 1 }
  end
  return link_view(self, Tensor.view_of(self, 0, shape, strides), { whole = true })
end

--- Entries start .. start + length - 1 (from 1) of a dimension, without a copy.
---@param dim integer     from 1; negative from the last
---@param start integer
---@param length integer
---@return liger.Tensor
function methods:narrow(dim, start, length)
  dim = dim > 0 and dim or #self.shape + 1 + dim
  local size = self.shape[dim]
  if not size or start % 1 ~= 0 or length % 1 ~= 0 or start < 1 or length < 0
    or start - 1 + length > size then
    lib.raise(
      ("narrow: entries %s to %s of dimension %s, wanted them within %s"):format(
        start, start + length - 1, dim, Tensor.shape_text(self.shape)
      )
    )
  end
  local shape, strides = {}, {}
  for i = 1, #self.shape do
    shape[i] = i == dim and length or self.shape[i]
    strides[i] = tonumber(self.raw.stride[i - 1])
  end
  local view = Tensor.view_of(self, (start - 1) * strides[dim], shape, strides)
  return link_view(self, view, { dim = dim, start = start, length = length })
end

--- Row i of the first dimension, from 1; negative counts from the last.
---@param i integer
---@return liger.Tensor
function methods:row(i)
  local size = self.shape[1] or 0
  local at = i < 0 and size + 1 + i or i
  if at < 1 or at > size then
    lib.raise(("row %d of a tensor %s"):format(i, Tensor.shape_text(self.shape)))
  end
  local part = self:narrow(1, at, 1)
  local shape, strides = {}, {}
  for k = 2, #self.shape do
    shape[k - 1] = self.shape[k]
    strides[k - 1] = tonumber(self.raw.stride[k - 1])
  end
  return link_view(part, Tensor.view_of(part, 0, shape, strides), { whole = true })
end

-- ---- gradient buffers ----

-- Its life is that of its holds, whatever scope the walk runs in.
local function new_grad(shape, dtype)
  local t = Tensor.empty(shape, dtype):keep()
  t.storage.holds = 1
  return t
end

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
    local leaf = edge.leaf
    if leaf.grad then
      Tensor.to_write(leaf.grad) -- may be the user's own
      return leaf.grad, true
    end
    leaf.grad = Tensor.empty(leaf.shape, grad_dtype(leaf.dtype)):keep()
    memory.claim(leaf.grad.storage, "gradients")
    return leaf.grad, false
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

-- A gradient that Lua code hands over, dense, or a refusal. Leaves and views add it up in their own
-- dtype.
local function checked_gradient(what, grad, edge)
  if not Tensor.is(grad) then
    lib.raise(("%s is %s, wanted a tensor"):format(what, type(grad)))
  end
  local got, wanted = Tensor.shape_text(grad.shape), Tensor.shape_text(edge.shape)
  if got ~= wanted or (grad.dtype ~= edge.dtype and not edge.leaf and not edge.base) then
    lib.raise(("%s is %s %s, wanted %s %s"):format(what, grad.dtype, got, edge.dtype, wanted))
  end
  return M.no_grad(grad.contiguous, grad):upload()
end

-- An addition passes its gradient on to both sides.
M.rules.add = function(node)
  local dy = M.incoming(node.out_y, true)
  M.give(node[1], dy)
  M.give(node[2], dy)
end

-- ---- the walk ----

local function by_falling_id(a, b)
  return a.id > b.id
end

-- Every node with an id over `above` that the gradient of `edge` reaches, latest first.
local function reachable(edge, above)
  local seen, order, stack = {}, {}, { edge }
  while #stack > 0 do
    local top = stack[#stack]
    stack[#stack] = nil
    while top.base do
      top = top.base
    end
    local node = top.node
    if node and not seen[node] and (node.freed or node.id > above) then
      if node.freed then
        lib.raise(
          "backward: this part of the graph was freed by an earlier backward; run the forward again"
        )
      end
      seen[node] = true
      order[#order + 1] = node
      for i = 1, node.n do
        if node[i] then
          stack[#stack + 1] = node[i]
        end
      end
    end
  end
  table.sort(order, by_falling_id)
  return order
end

local function free_node(node)
  for _, edge in ipairs(node.outputs) do
    if edge.grad then
      drop(edge.grad)
      edge.grad = nil
    end
  end
  for key in pairs(node) do
    node[key] = nil
  end
  node.freed = true
end

-- Runs the nodes that `edge` reaches and that are younger than `above`, freeing each.
local function walk(edge, above)
  local recording = state.recording
  state.recording = false
  for _, node in ipairs(reachable(edge, above)) do
    for _, output in ipairs(node.outputs) do
      if output.grad then
        node.run(node)
        break
      end
    end
    free_node(node)
  end
  state.recording = recording
end

--- Adds the gradient of this tensor to `.grad` of every leaf it came from, and frees the graph.
---@param gradient? liger.Tensor  incoming gradient; a scalar needs none
function methods:backward(gradient)
  if not self.edge then
    lib.raise("backward: tensor has no graph; did it come from tensors that require a gradient?")
  end
  if not gradient then
    if self:numel() ~= 1 then
      lib.raise(
        ("backward: tensor is %s, wanted one element, or a gradient"):format(
          Tensor.shape_text(self.shape)
        )
      )
    end
    gradient = Tensor.empty(self.shape, self.dtype):fill_(1)
    gradient.is_seed = true -- a 1 that nobody needs to read back
  else
    gradient = checked_gradient("backward: gradient", gradient, self.edge)
  end
  -- One hold more than the walk will drop: the caller keeps its tensor.
  gradient.storage.holds = (gradient.storage.holds or 0) + 1
  M.give(self.edge, gradient)
  walk(self.edge, 0)
end

--- Back to recording, after an error left a no_grad or a backward half-way.
function M.reset()
  state.recording = true
end

local function restore(recording, ...)
  state.recording = recording
  return ...
end

--- Runs fn without recording.
---@generic T
---@param fn fun(...): T
---@return T
function M.no_grad(fn, ...)
  local recording = state.recording
  state.recording = false
  return restore(recording, fn(...))
end

-- ---- rules of one's own ----

--- A differentiable function from its forward and backward.
---@param name string
---@param forward fun(saved: table, ...): liger.Tensor, ...   any arguments; keeps what the backward
---   needs in `saved`
---@param backward fun(saved: table, ...): ...  gradients of the outputs in (nil where none
---   arrived), gradients of the tensor
---   arguments out, in their order (nil: none); saved.edges[i] tells whether argument i wants one
---@return function
function M.rule(name, forward, backward)
  local function run(node)
    local dys = {}
    for i = 1, node.num_outputs do
      dys[i] = M.incoming(node["out_" .. i], false)
    end
    local grads = { backward(node.saved, unpack(dys, 1, node.num_outputs)) }
    for i = 1, node.n do
      local grad = grads[i]
      if grad and node[i] then
        grad = checked_gradient(("%s: gradient %d"):format(name, i), grad, node[i])
        -- The rule may keep what it returns, so this buffer is never freed early.
        grad.storage.holds = grad.storage.holds or 1
        M.give(node[i], grad)
      end
    end
  end
  return function(...)
    local args, edges, wanted = { ... }, {}, false
    for i = 1, select("#", ...) do
      local x = args[i]
      if Tensor.is(x) then
        edges[#edges + 1] = state.recording and x.edge or false
        wanted = wanted or edges[#edges] ~= false
      end
    end
    local saved = { edges = edges }
    local recording = state.recording
    state.recording = false
    local outputs = { forward(saved, ...) }
    state.recording = recording
    if wanted then
      local node = M.new_node(run, edges)
      node.saved, node.num_outputs = saved, #outputs
      for i, y in ipairs(outputs) do
        if y.edge then
          -- One of the arguments: an edge of its own for the result.
          y = y:detach()
          outputs[i] = y
        end
        if is_float(y.dtype) then
          node["out_" .. i] = M.new_edge(node, y)
        else
          node["out_" .. i] = { shape = y.shape, dtype = y.dtype }
        end
      end
    end
    return unpack(outputs)
  end
end

--- Runs fn(...) now without keeping its intermediate tensors, and again in the backward.
---@param fn fun(...): liger.Tensor  one tensor out; must do the same both times
---@param ... any  tensors and other arguments
---@return liger.Tensor
function M.checkpoint(fn, ...)
  if not state.recording then
    return fn(...)
  end
  local args, count = { ... }, select("#", ...)
  local edges = {}
  for i = 1, count do
    if Tensor.is(args[i]) then
      edges[#edges + 1] = args[i].edge or false
    end
  end
  local scope = memory.open_scope()
  state.recording = false
  local y = fn(unpack(args, 1, count))
  state.recording = true
  if y.edge then
    -- One of the arguments: an edge of its own for the result.
    y = y:detach()
  end
  y.storage.kept = y.storage.kept or 1
  memory.close_scope(scope)
  local above
  local node = M.new_node(function(node)
    local again, at = {}, 0
    for i = 1, count do
      again[i] = args[i]
      if Tensor.is(args[i]) then
        at = at + 1
        again[i] = args[i]:detach()
        if node[at] then
          -- The recomputed graph ends in the original edge.
          again[i].edge, again[i].requires_grad = node[at], true
        end
      end
    end
    local dy = M.incoming(node.out_y, true)
    local inner = memory.open_scope()
    state.recording = true
    local out = fn(unpack(again, 1, count))
    -- Only what fn made is walked here: edges that came from outside wait for their own turn.
    M.give(out.edge, dy)
    walk(out.edge, above)
    state.recording = false
    memory.close_scope(inner)
  end, edges)
  above = node.id
  node.out_y = M.new_edge(node, y)
  return y
end

return M
