-- The tape: which op made a tensor, and the walk back from a loss. The rules come from ops.h by way
-- of ops.lua; this file knows edges and nodes, gradient.lua the buffers that gradients arrive in.
--
-- An edge stands for one tensor's gradient. Three kinds:
--   leaf     gathers into leaf.grad
--   base     a view: its gradient is a part of the base edge's gradient, written in place there
--   others   made by a node; edge.grad holds what has arrived so far
local gradient = require("liger.gradient")
local lib = require("liger.ffi")
local memory = require("liger.memory")
local Tensor = require("liger.tensor")

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

-- ---- rules ----

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
  local dy = gradient.incoming(node.out_y, true)
  gradient.give(node[1], dy)
  gradient.give(node[2], dy)
end

-- So does the sum in add_rms_norm: one buffer for both.
M.rules.add_rms_norm = function(node, raw)
  local dy, ds = gradient.incoming(node.out_y, true), gradient.incoming(node.out_s, false)
  local dw, dw_add = gradient.sum_dest(node[3])
  local dx = (node[1] or node[2]) and gradient.new(node.s.shape, node.s.dtype)
  raw.add_rms_norm_backward(dy, ds, node.s, node.w, node.rstd, node.offset, dx, nil, dw)
  if dx then
    gradient.give(node[1], dx)
    gradient.give(node[2], dx)
    gradient.drop(dx)
  end
  if dw_add then gradient.settle(node[3], dw) end
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
      gradient.drop(edge.grad)
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
---@param grad? liger.Tensor  incoming gradient; a scalar needs none
function methods:backward(grad)
  if not self.edge then
    lib.raise("backward: tensor has no graph; did it come from tensors that require a gradient?")
  end
  if not grad then
    if self:numel() ~= 1 then
      lib.raise(
        ("backward: tensor is %s, wanted one element, or a gradient"):format(
          Tensor.shape_text(self.shape)
        )
      )
    end
    grad = Tensor.empty(self.shape, self.dtype):fill_(1)
    grad.is_seed = true -- a 1 that nobody needs to read back
  else
    grad = checked_gradient("backward: gradient", grad, self.edge)
  end
  -- One hold more than the walk will drop: the caller keeps its tensor.
  grad.storage.holds = (grad.storage.holds or 0) + 1
  gradient.give(self.edge, grad)
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
      dys[i] = gradient.incoming(node["out_" .. i], false)
    end
    local grads = { backward(node.saved, unpack(dys, 1, node.num_outputs)) }
    for i = 1, node.n do
      local grad = grads[i]
      if grad and node[i] then
        grad = checked_gradient(("%s: gradient %d"):format(name, i), grad, node[i])
        -- The rule may keep what it returns, so this buffer is never freed early.
        grad.storage.holds = grad.storage.holds or 1
        gradient.give(node[i], grad)
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
    local dy = gradient.incoming(node.out_y, true)
    local inner = memory.open_scope()
    state.recording = true
    local out = fn(unpack(again, 1, count))
    -- Only what fn made is walked here: edges that came from outside wait for their own turn.
    gradient.give(out.edge, dy)
    walk(out.edge, above)
    state.recording = false
    memory.close_scope(inner)
  end, edges)
  above = node.id
  node.out_y = M.new_edge(node, y)
  return y
end

return M
