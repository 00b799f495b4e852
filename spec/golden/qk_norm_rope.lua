local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local names, leaves, out = { "q", "k" }, {}, {}
  for _, name in ipairs(names) do
    local x, w = golden.leaf(case, name), golden.leaf(case, name .. "_weight")
    leaves[name], leaves[name .. "_weight"] = x, w
    local at = golden.rows_in_order(x:size(1))
    out[name] = ops.rope(ops.rms_norm(x, w, case.options.eps), case.get("in.cos"),
      case.get("in.sin"), at)
  end
  golden.backward(case, out)
  return golden.gradients({ ["out.q"] = out.q, ["out.k"] = out.k }, leaves)
end

return { compared = 1, run = run }
