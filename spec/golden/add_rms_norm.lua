local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local leaves = { x = golden.leaf(case, "x"), residual = golden.leaf(case, "residual"),
    weight = golden.leaf(case, "weight") }
  local s = leaves.x + leaves.residual
  local y, rstd = ops.rms_norm(s, leaves.weight, case.options.eps)
  golden.backward(case, { s = s, y = y })
  return golden.gradients({ ["out.s"] = s, ["out.y"] = y, ["out.rstd"] = rstd }, leaves)
end

return { compared = 1, run = run }
