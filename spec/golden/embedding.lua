local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  if case.options.padding_idx then
    return false, "padding_idx"
  end
  local w = golden.leaf(case, "weight")
  local y = ops.embedding(w, case.get("in.ids", "i32"))
  golden.backward(case, { y = y })
  return golden.gradients({ ["out.y"] = y }, { weight = w })
end

return { compared = 1, run = run }
