local golden_preference = require("spec.golden_preference")
local dpo = require("liger.loss.dpo")
local fn = require("liger.fn")
local ops = require("liger.ops")

local function run(case)
  local o = golden_preference.options(case, "reference")
  o.reference_free = case.options.reference == "none"
  local options = dpo.options(o)
  return golden_preference.run(case, options, dpo, {
    fill = function(batch, of)
      batch.ref_logps = case.get("in.ref_logps")
      if case.options.reference == "model" then
        local logp = golden_preference.frozen(case, "ref_", of.target, of.index)
        batch.ref_logps = dpo.logps(batch, logp, options)
      elseif o.reference_free then
        batch.ref_logps = fn.zeros(batch.completion_cu:numel() - 1, case.dtype)
      end
      if o.use_weighting then
        -- log sum p^2 = log sum e^(2 z) - 2 log sum e^z.
        local _, _, lse = fn.linear_logprob(of.x, of.w, of.target,
          { bias = of.bias, temperature = 0.5 })
        batch.log_p2 = ops.gather(lse - of.lse * 2, of.index)
      end
    end,
  })
end

return { compared = 21, run = run }
