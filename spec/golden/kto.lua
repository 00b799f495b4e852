local golden = require("spec.golden")
local golden_preference = require("spec.golden_preference")
local helper = require("spec.helper")
local fn = require("liger.fn")
local kto = require("liger.loss.kto")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

-- Sums of the mismatched answers under the policy and, where they are not given, the reference.
local function mismatched(case)
  local target = case.get("in.kl_target", "i32")
  local kl_case = { get = function(name, dtype)
    return case.get(name == "in.cu_seqlens" and "in.kl_cu_seqlens" or name, dtype)
  end }
  local rows, _, start = golden.completions(kl_case, target)
  local index, cu = Tensor.from_table(rows, "i32"), Tensor.from_table(start, "i32")
  local logps = ops.segment_sum(golden_preference.frozen(case, "kl_", target, index, ""), cu)
  local ref = case.get("in.ref_kl_logps")
    or ops.segment_sum(golden_preference.frozen(case, "ref_kl_", target, index, "ref_"), cu)
  return logps, ref
end

local function run(case)
  local options = kto.options(golden_preference.options(case, "reference"))
  local kl, kl_logps = 0, nil
  if options.loss_type == "kto" then
    local logps, ref = mismatched(case)
    kl, kl_logps = kto.kl(fn.sum(logps - ref):item(), logps:numel()), logps
  end
  local result = golden_preference.run(case, options, kto, {
    fill = function(batch, of)
      batch.labels, batch.kl = {}, kl
      for s, label in ipairs(helper.values(case.get("in.label"))) do
        batch.labels[s] = label == 1
      end
      batch.ref_logps = case.get("in.ref_logps")
        or ops.segment_sum(golden_preference.frozen(case, "ref_", of.target, of.index),
          batch.completion_cu)
    end,
  })
  result["metric.kl"], result["out.kl_logps"] = kl, kl_logps
  return result
end

return { compared = 5, run = run }
