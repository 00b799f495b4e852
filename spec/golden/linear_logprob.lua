local golden = require("spec.golden")
local fn = require("liger.fn")

local function run(case)
  local x, w, leaves = golden.head(case)
  local logp, entropy, lse = fn.linear_logprob(x, w, case.get("in.target", "i32"), {
    temperature = case.options.temperature, softcap = case.options.softcap, bias = leaves.bias,
  })
  golden.backward(case, { logp = logp, entropy = entropy })
  return golden.gradients({
    ["out.logp"] = logp, ["out.entropy"] = entropy, ["out.lse"] = lse,
  }, leaves)
end

return { compared = 4, run = run }
