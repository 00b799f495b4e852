local ops = require("liger.ops")
local optim = require("liger.optim")

local function run(case)
  local grads, result = {}, {}
  while case.get("in.grad" .. #grads) do
    grads[#grads + 1] = case.get("in.grad" .. #grads)
  end
  local norm = optim.clip.global_norm(grads)
  for i, grad in ipairs(grads) do
    result["out.clipped_grad" .. i - 1] = ops.affine(grad,
      optim.clip.factor(norm, case.options.max_norm), 0)
  end
  result["out.norm"] = norm
  return result
end

return { compared = 3, run = run }
