-- The global norm of gradients and the factor that clips it.
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local M = {}

--- The L2 norm over all gradients, summed in double. Waits for the device.
---@param gradients liger.Tensor[]
---@return number norm
---@return integer|nil bad  the first gradient with NaN or Inf
function M.global_norm(gradients)
  local squares = Tensor.empty({ #gradients }, "f64")
  for i, grad in ipairs(gradients) do
    ops.raw.sum_squares(grad, squares:row(i))
  end
  local values, total, bad = squares:read(), 0, nil
  for i = 0, #gradients - 1 do
    total = total + values[i]
    bad = bad or values[i] - values[i] ~= 0 and i + 1 or nil
  end
  return math.sqrt(total), bad
end

--- The factor that brings a norm down to max_norm: min(1, max_norm / (norm + 1e-6)).
---@param norm number
---@param max_norm number  0: no clipping
---@return number
function M.factor(norm, max_norm)
  if max_norm ~= max_norm or max_norm < 0 then
    lib.raise(("clip: max_grad_norm is %s, wanted 0 (off) or more"):format(tostring(max_norm)))
  end
  if max_norm == 0 then
    return 1
  end
  return math.min(1, max_norm / (norm + 1e-6))
end

return M
