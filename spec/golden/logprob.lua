local golden = require("spec.golden")
local fn = require("liger.fn")

-- Entropies are of all rows where a case gives no token, else of those that have one.
local function run(case)
  local logits, o = golden.leaf(case, "logits"), { temperature = case.options.temperature }
  local out = {}
  if case.get("in.index") then
    out.logp, out.entropy, out.lse = fn.logprob(logits, golden.targets(case, "index"), o)
  else
    out.entropy = fn.entropy(logits, o)
  end
  golden.backward(case, out)
  local result = golden.gradients({
    ["out.logp"] = out.logp, ["out.entropy"] = out.entropy, ["out.lse"] = out.lse,
  }, { logits = logits })
  if case.get("in.mask") then
    result["out.lse"] = nil -- that of ignored rows is 0 here
    result.without = { ["out.lse"] = true }
  end
  return result
end

return { compared = 6, run = run }
