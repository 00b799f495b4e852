local golden = require("spec.golden")
local ops = require("liger.ops")

local function run(case)
  local o = case.options
  local function norm(x, w)
    return ops.rms_norm(x, w, o.eps, o.offset, o.casting == "llama")
  end
  local x, w = golden.leaf(case, "x"), golden.leaf(case, "weight")
  local y, rstd = norm(x, w)
  golden.backward(case, { y = y })
  local result = golden.gradients({ ["out.y"] = y, ["out.rstd"] = rstd }, { x = x, weight = w })
  if o.casting ~= "none" then
    local half = norm(case.get("in.x", "bf16"), case.get("in.weight", "bf16"))
    result.exact = { ["out.y_bf16"] = half }
  end
  return result
end

return { compared = 4, run = run }
