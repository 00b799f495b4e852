-- Which tensor a NaN or an infinity is in.
local M = {}

local exponent_bits = { bf16 = 0x7F80, f16 = 0x7C00 }

local is_integral = { i32 = true, i64 = true, u8 = true }

local function all_finite(tensor)
  if is_integral[tensor.dtype] or tensor.storage.dead then
    return true
  end
  local t = tensor:is_contiguous() and tensor or tensor:detach():clone()
  local data, exponent = t:read(), exponent_bits[t.dtype]
  for i = 0, t:numel() - 1 do
    if exponent then
      if bit.band(data[i], exponent) == exponent then
        return false
      end
    elseif data[i] - data[i] ~= 0 then
      return false
    end
  end
  return true
end

--- The first of the tensors that holds a NaN or an infinity; where all are finite, the first whose
--- gradient does, or did at the optimiser's last step.
---@param watched { name: string, tensor: liger.Tensor }[]
---@return string|nil
function M.first(watched)
  for _, entry in ipairs(watched) do
    if not all_finite(entry.tensor) then
      return entry.name
    end
  end
  for _, entry in ipairs(watched) do
    if entry.tensor.grad_failed or entry.tensor.grad and not all_finite(entry.tensor.grad) then
      return "gradient of " .. entry.name
    end
  end
end

return M
