local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local leaves, out = {}, {}
  for _, name in ipairs({ "q", "k" }) do
    local x, w = golden.leaf(case, name), golden.leaf(case, name .. "_weight")
    leaves[name], leaves[name .. "_weight"] = x, w
    out[name] = ops.qk_norm_rope(x, w, case.get("in.cos"), case.get("in.sin"),
      golden.rows_in_order(x:size(1)), case.options.eps)
  end
  golden.backward(case, out)
  return golden.gradients({ ["out.q"] = out.q, ["out.k"] = out.k }, leaves)
end

return { compared = 1, run = run }
