local golden = require("spec.golden")
local autograd = require("liger.autograd")
local fn = require("liger.fn")

local function hits(predicted, target, ignore)
  local count = 0
  for i = 0, target:numel() - 1 do
    local id = target:data()[i]
    count = count + (id ~= ignore and predicted:data()[i] == id and 1 or 0)
  end
  return count
end

local function run(case)
  local o = case.options
  if o.label_smoothing or o.z_loss or o.token_scaling or case.get("in.class_weight") then
    return false, "label smoothing, z-loss, class weights, dft"
  elseif case.flags["not-finite"] then
    return false, "logits of -inf cannot come from a product"
  end
  local x, w, leaves = golden.head(case)
  local target = golden.targets(case, "target", x:size(1))
  local ids, ignore, kept = target:data(), o.ignore_index or -100, 0
  for i = 0, target:numel() - 1 do
    kept = kept + (ids[i] ~= ignore and 1 or 0)
  end
  if o.reduction == "none" then
    -- A gradient a row: linear_logprob is the op for it.
    local _, rows = autograd.no_grad(fn.linear_cross_entropy, x, w, target, { ignore = ignore })
    local logp = fn.linear_logprob(x, w, target, { softcap = o.softcap, ignore = ignore })
    local loss = -logp
    golden.backward(case, { loss = loss })
    return golden.gradients({
      ["out.loss"] = loss, ["out.predicted"] = rows.predicted,
      ["out.accuracy"] = hits(rows.predicted, target, ignore) / math.max(kept, 1),
    }, leaves)
  end
  local up = case.get("up.loss"):item()
  local count = math.max(kept, 1)
  local scale = o.reduction == "sum" and 1 or o.reduction == "tokens" and 1 / o.num_items
    or 1 / count
  local loss, rows = fn.linear_cross_entropy(x, w, target, {
    scale = scale * up, softcap = o.softcap, ignore = ignore, bias = leaves.bias,
  })
  loss:backward()
  local entropy, accuracy = fn.sum(rows.entropy):item() / count,
    hits(rows.predicted, target, ignore) / count
  local logp = rows.loss * -1
  return golden.gradients({
    ["out.loss"] = loss * (1 / up), ["out.rows"] = rows.loss, ["out.logp"] = logp,
    ["out.entropy"] = rows.entropy,
    ["out.predicted"] = rows.predicted, ["out.accuracy"] = accuracy,
    ["metric.entropy"] = entropy, ["metric.mean_token_accuracy"] = accuracy,
  }, leaves)
end

return { compared = 4, run = run }
