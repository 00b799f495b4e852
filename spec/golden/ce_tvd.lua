-- The distillation losses, on logits and on heads. In a head's case the loss and its gradients are
-- made together; a case on logits runs on the operator.
local golden = require("spec.golden")
local fn = require("liger.fn")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local KINDS = {
  ce_tvd = "tvd", tvd = "tvd", jsd = "jsd", kl = "jsd", cosine = "cosine",
}

-- beta of the jsd, and what the soft loss is multiplied by.
local function constants(name, o)
  if name == "kl" then
    return o.direction == "forward" and 0 or 1, 1
  elseif name == "cosine" then
    return 0, o.beta or 1
  end
  return o.beta or 0.5, 1
end

local function count(target)
  local kept = 0
  for i = 0, target:numel() - 1 do
    kept = kept + (target:data()[i] ~= -100 and 1 or 0)
  end
  return math.max(kept, 1)
end

local function on_logits(case, name, target, o)
  local beta, factor = constants(name, o)
  local student, teacher = golden.leaf(case, "logits"), case.get("in.teacher_logits")
  local T = o.temperature or 1
  local hard, soft
  if name == "ce_tvd" then
    hard, soft = ops.ce_tvd(student, teacher, target, T, -100)
  elseif name == "tvd" then
    soft = ops.tvd(student, teacher, target, T, -100)
  elseif name == "cosine" then
    soft = ops.cosine(student, teacher, target, T, -100) * factor
  else
    soft = ops.jsd(student, teacher, target, beta, T, -100)
  end
  if o.weight_hard then
    hard = -fn.logprob(student, target)
  end
  return student, hard, soft
end

local function run_logits(case, name)
  local o = case.options
  local rows = case.get("in.logits"):size(1)
  local target = case.get("in.target", "i32") or Tensor.empty({ rows }, "i32"):fill_(0)
  local student, hard, soft = on_logits(case, name, target, o)
  local outputs = { token_loss = soft, ce = hard, tvd = soft }
  if o.reduction ~= "none" then
    local n = count(target)
    local of_soft, of_hard = fn.sum(soft) * (1 / n), hard and fn.sum(hard) * (1 / n)
    outputs.soft_loss, outputs.hard_loss = of_soft, of_hard
    outputs.loss = of_soft * (o.weight_tvd or o.weight_soft or 1)
    if hard then
      outputs.loss = outputs.loss + of_hard * (o.weight_ce or o.weight_hard or 1)
    end
  end
  golden.backward(case, outputs)
  return outputs, { logits = student }
end

local function run_heads(case, name)
  local o = case.options
  local beta, factor = constants(name, o)
  local x, w, leaves = golden.head(case)
  local target = case.get("in.target", "i32")
  local n, is_pair = count(target), name == "ce_tvd"
  local weight_soft = o.weight_tvd or o.weight_soft or 1
  local weight_hard = is_pair and (o.weight_ce or 1) or o.weight_hard or 0
  local loss, rows = fn.linear_distill(
    x, w, case.get("in.teacher_hidden"), case.get("in.teacher_weight"), target, {
      bias = leaves.bias, teacher_bias = case.get("in.teacher_bias"), divergence = KINDS[name],
      beta = beta, temperature = o.temperature,
      weight_hard = case.get("up.ce") or weight_hard / n,
      weight_soft = case.get("up.tvd") or weight_soft * factor / n,
    }
  )
  loss:backward()
  local soft = rows.soft * factor
  return {
    loss = loss, ce = rows.hard, tvd = soft, token_loss = soft,
    hard_loss = fn.sum(rows.hard) * (1 / n), soft_loss = fn.sum(soft) * (1 / n),
    entropy = fn.sum(rows.entropy) * (1 / n),
  }, leaves
end

local function run(case)
  local name = case.op:gsub("^linear_", "")
  local outputs, leaves = (case.get("in.logits") and run_logits or run_heads)(case, name)
  local result = { ["metric.entropy"] = outputs.entropy }
  for key, y in pairs(outputs) do
    result["out." .. key] = y
  end
  return golden.gradients(result, leaves)
end

return { compared = 5, run = run }
