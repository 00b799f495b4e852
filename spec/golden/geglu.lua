local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local leaves = { gate = golden.leaf(case, "gate"), up = golden.leaf(case, "up") }
  local y = ops.geglu(leaves.gate, leaves.up, case.options.approximate == "tanh")
  golden.backward(case, { y = y })
  return golden.gradients({ ["out.y"] = y }, leaves)
end

return { compared = 2, run = run }
