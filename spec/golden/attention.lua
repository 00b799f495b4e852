local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local o = case.options
  if o.window or o.softcap or case.get("in.sinks") then
    return false, "window, softcap, sinks"
  end
  local leaves = {}
  for _, name in ipairs({ "q", "k", "v" }) do
    leaves[name] = golden.leaf(case, name)
  end
  local scale = o.scale or leaves.q:size(3) ^ -0.5
  local y, lse = ops.attention(leaves.q, leaves.k, leaves.v, case.get("in.cu_seqlens", "i32"),
    scale, o.causal ~= false)
  golden.backward(case, { o = y })
  return golden.gradients({ ["out.o"] = y, ["out.lse"] = lse }, leaves)
end

return { compared = 3, run = run }
