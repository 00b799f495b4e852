local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local w = golden.leaf(case, "weight")
  local y = ops.embedding(w, case.get("in.ids", "i32"), case.options.padding_idx)
  golden.backward(case, { y = y })
  return golden.gradients({ ["out.y"] = y }, { weight = w })
end

return { compared = 2, run = run }
