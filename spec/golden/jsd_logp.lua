-- Divergences of given log-probabilities and probabilities.
local golden = require("spec.golden")
local fn = require("liger.fn")
local ops = require("liger.ops")

local function run(case)
  local o, target = case.options, case.get("in.target", "i32")
  local name = case.get("in.student_p") and "student_p" or "student_logp"
  local student = golden.leaf(case, name)
  local N, V = student:size(1), student:size(2)
  local loss
  local kept = target and 0 or N
  for i = 0, target and N - 1 or -1 do
    kept = kept + (target:data()[i] ~= -100 and 1 or 0)
  end
  if case.op == "jsd_logp" then
    loss = ops.jsd_logp(student, case.get("in.teacher_logp"), target, o.beta, -100)
  elseif case.op == "kl_logp" then
    loss = ops.kl_logp(student, case.get("in.teacher"), target, o.log_target or false, -100)
  else
    loss = ops.tvd_prob(student, case.get("in.teacher_p"), target, -100)
  end
  local divisor = o.reduction == "sum" and 1 or o.reduction == "mean" and kept * V or kept
  local total = fn.sum(loss) * (1 / math.max(divisor, 1))
  golden.backward(case, { loss = total })
  return golden.gradients(
    { ["out.loss"] = total, ["out.token_loss"] = loss }, { [name] = student }
  )
end

return { compared = 2, run = run }
