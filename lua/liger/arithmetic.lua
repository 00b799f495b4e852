-- Arithmetic on tensors and numbers: operators, comparisons, sums, conversions, as functions and as
-- methods.
local autograd = require("liger.autograd")
local create = require("liger.create")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local M = {}
local methods = Tensor.methods

-- ---- operators ----

--- scale * x + shift.
M.affine = ops.affine

local function add(a, b)
  if type(b) == "number" then
    return ops.affine(a, 1, b)
  elseif type(a) == "number" then
    return ops.affine(b, 1, a)
  end
  return ops.add(a, b)
end

local function sub(a, b)
  if type(b) == "number" then
    return ops.affine(a, 1, -b)
  elseif type(a) == "number" then
    return ops.affine(b, -1, a)
  end
  return ops.sub(a, b)
end

local function mul(a, b)
  if type(b) == "number" then
    return ops.affine(a, b, 0)
  elseif type(a) == "number" then
    return ops.affine(b, a, 0)
  end
  return ops.mul(a, b)
end

local function div(a, b)
  if type(b) == "number" then
    return ops.affine(a, 1 / b, 0)
  elseif type(a) == "number" then
    return ops.affine(ops.power(b, -1), a, 0)
  end
  return ops.div(a, b)
end

Tensor.__add, Tensor.__sub, Tensor.__mul, Tensor.__div = add, sub, mul, div

function Tensor.__unm(x)
  return ops.affine(x, -1, 0)
end

function Tensor.__pow(x, p)
  return ops.power(x, p)
end

-- A number beside a tensor becomes a tensor.
local function both(a, b)
  if type(a) == "number" then
    return create.full_like(b, a), b
  elseif type(b) == "number" then
    return a, create.full_like(a, b)
  end
  return a, b
end

--- The smaller of two, element by element; either may be a number.
function M.minimum(a, b)
  return ops.minimum(both(a, b))
end

--- The larger of two, element by element; either may be a number.
function M.maximum(a, b)
  return ops.maximum(both(a, b))
end

--- 1 where a < b, else 0.
function M.lt(a, b)
  return ops.less(both(a, b))
end

--- 1 where a <= b, else 0.
function M.le(a, b)
  return ops.less_equal(both(a, b))
end

--- 1 where a > b, else 0.
function M.gt(a, b)
  a, b = both(a, b)
  return ops.less(b, a)
end

--- 1 where a >= b, else 0.
function M.ge(a, b)
  a, b = both(a, b)
  return ops.less_equal(b, a)
end

--- 1 where a = b, else 0.
function M.eq(a, b)
  return ops.equal(both(a, b))
end

--- a where mask is not 0, else b; a and b may be numbers. What is not chosen is not read, a NaN
--- there stays out.
---@param mask liger.Tensor
---@return liger.Tensor
function M.where(mask, a, b)
  if type(a) == "number" then
    a = create.full_like(Tensor.is(b) and b or mask, a)
  end
  if type(b) == "number" then
    b = create.full_like(a, b)
  end
  return ops.where(mask, a, b)
end

for _, name in ipairs(
  { "exp", "log", "abs", "sigmoid", "log_sigmoid", "sum", "clamp", "power", "gather" }
) do
  M[name] = ops[name]
  methods[name] = ops[name]
end
for _, name in ipairs({ "minimum", "maximum", "lt", "le", "gt", "ge", "eq" }) do
  methods[name] = M[name]
end

--- Square root.
function M.sqrt(x, extra)
  if extra ~= nil then
    ops.refuse_extra("sqrt", 2, extra, "x")
  end
  return ops.power(x, 0.5)
end
methods.sqrt = M.sqrt

--- Mean of all elements; 0 of none.
---@return liger.Tensor []
function M.mean(x, extra)
  if extra ~= nil then
    ops.refuse_extra("mean", 2, extra, "x")
  end
  return ops.affine(ops.sum(x), 1 / math.max(x:numel(), 1), 0)
end
methods.mean = M.mean

--- Sum over the elements that the mask selects; what it does not select may be NaN.
---@param x liger.Tensor     [*]
---@param mask liger.Tensor  [*] 0 or 1
---@return liger.Tensor      []
function M.masked_sum(x, mask, extra)
  if extra ~= nil then
    ops.refuse_extra("masked_sum", 3, extra, "mask")
  end
  return ops.sum(M.where(mask, x, 0))
end

--- Mean over the elements that the mask selects; 0 when it selects none.
---@param x liger.Tensor     [*]
---@param mask liger.Tensor  [*] 0 or 1
---@return liger.Tensor      []
function M.masked_mean(x, mask, extra)
  if extra ~= nil then
    ops.refuse_extra("masked_mean", 3, extra, "mask")
  end
  -- The sum of squares: exact, where a bf16 sum of ones would be rounded.
  local count = ops.sum_squares(mask):item()
  return ops.affine(M.masked_sum(x, mask), 1 / math.max(count, 1), 0)
end

--- Softmax over the last dimension.
---@param x liger.Tensor  [*,V]
---@return liger.Tensor   [*,V]
M.softmax = ops.softmax

--- Sum over each packed sequence.
---@param x liger.Tensor           [N]
---@param cu_seqlens liger.Tensor  [S+1] i32
---@return liger.Tensor            [S]
M.segment_sum = ops.segment_sum

--- Mean over each packed sequence; 0 for an empty one.
---@param x liger.Tensor           [N]
---@param cu_seqlens liger.Tensor  [S+1] i32
---@return liger.Tensor            [S]
function M.segment_mean(x, cu_seqlens)
  local start, lengths = cu_seqlens:read(), {}
  for s = 1, cu_seqlens:numel() - 1 do
    lengths[s] = math.max(start[s] - start[s - 1], 1)
  end
  return ops.div(ops.segment_sum(x, cu_seqlens), Tensor.from_table(lengths, x.dtype))
end

-- ---- conversion ----

local to_dtype = autograd.rule("to", function(saved, x, dtype)
  saved.shape, saved.dtype = x.shape, x.dtype
  local y = Tensor.empty(x.shape, dtype)
  ops.copy(x, y)
  return y
end, function(saved, dy)
  local dx = Tensor.empty(saved.shape, saved.dtype)
  ops.copy(dy, dx)
  return dx
end)

--- A copy in another dtype; the tensor itself when it has it already.
---@param dtype string
---@return liger.Tensor
function methods:to(dtype)
  if dtype == self.dtype then
    return self
  end
  return to_dtype(self, dtype)
end

--- A dense copy.
---@return liger.Tensor
function methods:clone()
  return to_dtype(self, self.dtype)
end

--- The tensor itself when it is dense, else a dense copy.
---@return liger.Tensor
function methods:contiguous()
  return self:is_contiguous() and self or self:clone()
end

--- The k largest values of a vector with their 0-based positions: two Lua arrays, largest first, of
--- equals the lower position.
---@param k integer
---@return number[] values
---@return integer[] indices
function methods:topk(k, extra)
  if extra ~= nil then
    ops.refuse_extra("topk", 2, extra, "k")
  end
  if #self.shape ~= 1 then
    lib.raise(("topk: tensor is %s, wanted one dimension"):format(Tensor.shape_text(self.shape)))
  end
  local all, order = self:to_table(), {}
  for i = 1, #all do
    order[i] = i
  end
  table.sort(order, function(a, b)
    if all[a] ~= all[b] then
      return all[a] > all[b]
    end
    return a < b
  end)
  local values, indices = {}, {}
  for i = 1, math.min(k, #all) do
    values[i], indices[i] = all[order[i]], order[i] - 1
  end
  return values, indices
end

return M
