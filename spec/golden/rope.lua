local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  if case.options.style ~= "half" then
    return false, "interleaved"
  end
  local q, k = golden.leaf(case, "q"), golden.leaf(case, "k")
  local cos, sin = case.get("in.cos"), case.get("in.sin")
  local at = golden.rows_in_order(q:size(1))
  local out = { q = ops.rope(q, cos, sin, at), k = ops.rope(k, cos, sin, at) }
  golden.backward(case, out)
  return golden.gradients({ ["out.q"] = out.q, ["out.k"] = out.k }, { q = q, k = k })
end

return { compared = 3, run = run }
