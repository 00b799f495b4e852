local golden = require("spec.golden")
local fn = require("liger.fn")

local function run(case)
  local o, logits = case.options, golden.leaf(case, "logits")
  local loss, rows = fn.cross_entropy(logits, case.get("in.target", "i32"), {
    reduction = o.reduction, class_weight = case.get("in.class_weight"),
    label_smoothing = o.label_smoothing, z_loss = o.z_loss, softcap = o.softcap,
    ignore = o.ignore_index,
  })
  golden.backward(case, { loss = loss })
  return golden.gradients({
    ["out.loss"] = loss, ["out.predicted"] = rows.predicted, ["out.accuracy"] = rows.accuracy,
    -- The cases with a z-loss are means.
    ["out.z_loss"] = rows.z_loss and fn.sum(rows.z_loss)
      / fn.sum(fn.ge(rows.predicted:to(case.dtype), 0)),
  }, { logits = logits })
end

return { compared = 15, run = run }
