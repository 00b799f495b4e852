local golden = require("spec.golden")
local autograd = require("liger.autograd")
local fn = require("liger.fn")

local function mean(x, kept)
  return fn.sum(x):item() / math.max(kept, 1)
end

-- The gradient comes from above as the scale, but for a mean with class weights, whose divisor is
-- the function's own: there it is applied to what came out.
local function run(case)
  local o, up = case.options, case.get("up.loss"):item()
  local x, w, leaves = golden.head(case)
  local target, kept, hits = case.get("in.target", "i32"), 0, 0
  local options = {
    bias = leaves.bias, class_weight = case.get("in.class_weight"), softcap = o.softcap,
    label_smoothing = o.label_smoothing, z_loss = o.z_loss, token_scaling = o.token_scaling,
    scale = o.num_items and up / o.num_items,
  }
  local loss, rows = fn.linear_cross_entropy(x, w, target, options)
  loss:backward()
  local result = golden.gradients({}, leaves)
  for key, gradient in pairs(result) do
    result[key] = options.scale and gradient or gradient * up
  end
  for i = 0, target:numel() - 1 do
    local id = target:data()[i]
    kept = kept + (id ~= -100 and 1 or 0)
    hits = hits + (id ~= -100 and rows.predicted:data()[i] == id and 1 or 0)
  end
  result["out.loss"] = options.scale and loss * (1 / up) or loss
  result["out.logp"] = autograd.no_grad(fn.linear_logprob, x, w, target,
    { bias = leaves.bias, softcap = o.softcap })
  result["out.entropy"], result["out.predicted"] = rows.entropy, rows.predicted
  result["out.z_loss"] = rows.z_loss and mean(rows.z_loss, kept)
  result["out.accuracy"] = hits / math.max(kept, 1)
  result["metric.entropy"] = mean(rows.entropy, kept)
  result["metric.mean_token_accuracy"] = hits / math.max(kept, 1)
  return result
end

return { compared = 6, run = run }
