local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  if case.options.offset then
    return false, "offset"
  end
  local x, w = golden.leaf(case, "x"), golden.leaf(case, "weight")
  local y, rstd = ops.rms_norm(x, w, case.options.eps)
  golden.backward(case, { y = y })
  local result = golden.gradients({ ["out.y"] = y, ["out.rstd"] = rstd }, { x = x, weight = w })
  if case.options.casting == "llama" then
    local half = ops.rms_norm(case.get("in.x", "bf16"), case.get("in.weight", "bf16"),
      case.options.eps)
    result.exact = { ["out.y_bf16"] = half }
  end
  return result
end

return { compared = 3, run = run }
