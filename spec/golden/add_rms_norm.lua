local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local leaves = { x = golden.leaf(case, "x"), residual = golden.leaf(case, "residual"),
    weight = golden.leaf(case, "weight") }
  local s, y, rstd = ops.add_rms_norm(leaves.x, leaves.residual, leaves.weight, case.options.eps)
  golden.backward(case, { s = s, y = y })
  return golden.gradients({ ["out.s"] = s, ["out.y"] = y, ["out.rstd"] = rstd }, leaves)
end

return { compared = 1, run = run }
