local golden = require("spec.golden")
local fn = require("liger.fn")

local function run(case)
  local x, w, leaves = golden.head(case)
  local target = golden.targets(case, case.get("in.index") and "index" or "target", x:size(1))
  if #target.shape > 1 then
    return false, "several targets a row"
  end
  local o = { temperature = case.options.temperature, softcap = case.options.softcap,
    bias = leaves.bias }
  local logp, entropy, lse = fn.linear_logprob(x, w, target, o)
  golden.backward(case, { logp = logp, entropy = entropy })
  local out = { ["out.logp"] = logp, ["out.entropy"] = entropy, ["out.lse"] = lse }
  local result = golden.gradients(out, leaves)
  if case.get("in.mask") then
    result["out.lse"] = nil -- that of ignored rows is 0 here
    result.without = { ["out.lse"] = true }
  end
  return result
end

return { compared = 4, run = run }
