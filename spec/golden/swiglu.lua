local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local both = golden.leaf(case, "gate_up")
  local leaves = { gate_up = both }
  if not both then
    leaves = { gate = golden.leaf(case, "gate"), up = golden.leaf(case, "up") }
  end
  local gate, up = leaves.gate, leaves.up
  if both then
    local width = both:size(2) / 2
    gate, up = both:narrow(2, 1, width), both:narrow(2, width + 1, width)
  end
  local y = ops.swiglu(gate, up)
  golden.backward(case, { y = y })
  return golden.gradients({ ["out.y"] = y }, leaves)
end

return { compared = 2, run = run }
