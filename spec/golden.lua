-- What the runners of spec/golden/ share. A runner is a file named by the golden op,
--   return { compared = N, run = function(case) ... end, only_f64 = true?, elsewhere = "a spec"? }
-- where run gives the case's outputs, gradients and metrics under the file's names (every number of
-- the file must be among them), or false and a reason when the case is not built; `compared` is how
-- many cases are: one that falls out is missed. A case: { name, op, options, drawing, flags,
-- tensors, dtype, get(key, dtype?) }. `exact` in a result holds numbers that must be equal,
-- `without` those left out.
local fn = require("liger.fn")
local helper = require("spec.helper")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local M = {}

-- sum(up * out) over the outputs that have an `up`.
function M.backward(case, outputs)
  local total
  for name, y in pairs(outputs) do
    local up = case.get("up." .. name)
    if up then
      local part = fn.sum(y * up)
      total = total and total + part or part
    end
  end
  total:backward()
end

function M.gradients(result, leaves)
  for name, x in pairs(leaves) do
    result["grad." .. name] = x.grad or fn.full_like(x, 0)
  end
  return result
end

function M.leaf(case, name)
  local x = case.get("in." .. name)
  return x and x:requires_grad_()
end

function M.rows_in_order(n)
  local list = {}
  for i = 1, n do
    list[i] = i - 1
  end
  return Tensor.from_table(list, "i32")
end

-- ---- rotary embeddings ----

--- q and k turned by tables, and their gradients.
function M.rotated(case, cos, sin, position, interleaved)
  local q, k = M.leaf(case, "q"), M.leaf(case, "k")
  local out = { q = ops.rope(q, cos, sin, position, interleaved),
    k = ops.rope(k, cos, sin, position, interleaved) }
  M.backward(case, out)
  return M.gradients({ ["out.q"] = out.q, ["out.k"] = out.k }, { q = q, k = k })
end

-- The same for a case whose in.cos and in.sin are [planes,N,columns], by a table of planes * N
-- positions whose column i is the file's column source(i).
function M.rotated_in_planes(case, plane, source)
  local planes, N, columns = unpack(case.get("in.cos").shape)
  local R = plane:numel()
  local function flat(name)
    local given = helper.values(case.get(name))
    local y = Tensor.empty({ planes * N, R }, case.dtype)
    for row = 0, planes * N - 1 do
      for i = 0, R - 1 do
        y:data()[row * R + i] = given[row * columns + source(i) + 1]
      end
    end
    return y
  end
  local position = M.rows_in_order(planes * N):reshape(planes, N)
  return M.rotated(case, ops.rope_planes(flat("in.cos"), position, plane),
    ops.rope_planes(flat("in.sin"), position, plane), M.rows_in_order(N), false)
end

-- ---- heads ----

-- Hidden states, weight, and these and the bias, if any, by name.
function M.head(case)
  local leaves = { hidden = M.leaf(case, "hidden"), weight = M.leaf(case, "weight"),
    bias = M.leaf(case, "bias") }
  return leaves.hidden, leaves.weight, leaves
end

-- Targets as i32, -100 where a mask is 0.
function M.targets(case, name)
  local target, mask = case.get("in." .. name, "i32"), case.get("in.mask", "i32")
  for i = 0, mask and mask:numel() - 1 or -1 do
    if mask:data()[i] == 0 then
      target:data()[i] = -100
    end
  end
  return target
end

-- The rows that count, by sequence.
function M.completions(case, target)
  local cu = case.get("in.cu_seqlens", "i32"):data()
  local rows, sequence, start = {}, {}, { 0 }
  local S = case.get("in.cu_seqlens"):numel() - 1
  for s = 0, S - 1 do
    for i = cu[s], cu[s + 1] - 1 do
      if target:data()[i] ~= -100 then
        rows[#rows + 1], sequence[#sequence + 1] = i, s
      end
    end
    start[s + 2] = #rows
  end
  return rows, sequence, start
end

function M.picked(x, rows, dtype)
  local all, list = helper.values(x), {}
  for k, i in ipairs(rows) do
    list[k] = all[i + 1]
  end
  return Tensor.from_table(list, dtype)
end

return M
