local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local o = case.options
  local leaves = {}
  for _, name in ipairs({ "q", "k", "v", "sinks" }) do
    leaves[name] = golden.leaf(case, name)
  end
  -- These files count the scale of scores among how the inputs were drawn.
  local scale = case.drawing.scale or leaves.q:size(3) ^ -0.5
  local y, lse = ops.attention(leaves.q, leaves.k, leaves.v, case.get("in.cu_seqlens", "i32"),
    leaves.sinks, scale, o.causal ~= false, o.window or 0, o.softcap or 0)
  golden.backward(case, { o = y })
  return golden.gradients({ ["out.o"] = y, ["out.lse"] = lse }, leaves)
end

return { compared = 6, run = run }
