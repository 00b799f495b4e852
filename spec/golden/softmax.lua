local golden = require("spec.golden")
local fn = require("liger.fn")

local function run(case)
  local x = golden.leaf(case, "x")
  local y = fn.softmax(x)
  golden.backward(case, { y = y })
  return golden.gradients({ ["out.y"] = y }, { x = x })
end

return { compared = 1, run = run }
