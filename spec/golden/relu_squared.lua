local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local x = golden.leaf(case, "x")
  local y = ops.relu_squared(x)
  golden.backward(case, { y = y })
  return golden.gradients({ ["out.y"] = y }, { x = x })
end

return { compared = 1, run = run }
