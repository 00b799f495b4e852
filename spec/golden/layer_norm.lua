local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local leaves = { x = golden.leaf(case, "x"), weight = golden.leaf(case, "weight"),
    bias = golden.leaf(case, "bias") }
  local y, mean, rstd = ops.layer_norm(leaves.x, leaves.weight, leaves.bias, case.options.eps)
  golden.backward(case, { y = y })
  return golden.gradients({ ["out.y"] = y, ["out.mean"] = mean, ["out.rstd"] = rstd }, leaves)
end

return { compared = 2, run = run }
