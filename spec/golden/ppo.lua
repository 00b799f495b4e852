local golden = require("spec.golden")
local fn = require("liger.fn")
local ops = require("liger.ops")
local ppo = require("liger.loss.ppo")
local Tensor = require("liger.tensor")

local function run(case)
  local options = ppo.options(case.options)
  local x, w, leaves = golden.head(case)
  leaves.value_weight, leaves.value_bias = golden.leaf(case, "value_weight"),
    golden.leaf(case, "value_bias")
  local target = case.get("in.target", "i32")
  local rows = golden.completions(case, target)
  local index = Tensor.from_table(rows, "i32")
  local logp, entropy = fn.linear_logprob(x, w, target, { bias = leaves.bias })
  local value = ppo.value(x, leaves.value_weight, leaves.value_bias:reshape(1))
  local inner, inner_entropy = logp:detach():requires_grad_(), entropy:detach():requires_grad_()
  local batch = {}
  for name, from in pairs({ advantage = "advantages", old_logp = "old_logp", returns = "returns",
    old_value = "old_value" }) do
    batch[name] = golden.picked(case.get("in." .. from), rows, case.dtype)
  end
  local loss, metrics = ppo.loss(batch, ops.gather(inner, index), ops.gather(inner_entropy, index),
    ops.gather(value, index), options)
  loss:backward()
  logp:backward(inner.grad)
  local result = {
    ["out.loss"] = loss, ["out.logp"] = logp, ["out.dlogp"] = inner.grad,
    ["out.entropy"] = entropy, ["out.dentropy"] = inner_entropy.grad, ["out.value"] = value,
  }
  for name, metric in pairs(metrics) do
    result["metric." .. name] = metric
  end
  return golden.gradients(result, leaves)
end

return { compared = 2, run = run }
