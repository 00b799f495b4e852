-- What the golden runners of the preference methods share: a packed batch of sequences, its loss
-- through the head, gradients and metrics.
local golden = require("spec.golden")
local fn = require("liger.fn")
local ops = require("liger.ops")
local preference = require("liger.train.preference")
local Tensor = require("liger.tensor")

local M = {}

-- The case's options without those of the harness.
function M.options(case, ...)
  local y, not_ours = {}, {}
  for _, name in ipairs({ ... }) do
    not_ours[name] = true
  end
  for key, value in pairs(case.options) do
    if not not_ours[key] then
      y[key] = value
    end
  end
  return y
end

--- Log-probabilities of the rows `index` under the head and hidden states of `prefix`; no gradient.
function M.frozen(case, prefix, target, index, weight)
  local head = weight or prefix
  local logp = fn.linear_logprob(case.get(("in.%shidden"):format(prefix)),
    case.get(("in.%sweight"):format(head)), target,
    { bias = case.get(("in.%sbias"):format(head)) })
  return ops.gather(logp, index)
end

--- Runs method.loss(batch, logp, options) on the case. settings: target, the name of the targets;
--- fill(batch, of), which completes the batch.
function M.run(case, options, method, settings)
  local x, w, leaves = golden.head(case)
  local target = case.get("in." .. (settings.target or "target"), "i32")
  local rows, sequence, start = golden.completions(case, target)
  local index = Tensor.from_table(rows, "i32")
  local logp, entropy, lse, predicted = fn.linear_logprob(x, w, target, {
    bias = leaves.bias, predicted = true,
  })
  local batch = {
    completion_cu = Tensor.from_table(start, "i32"), num_tokens = x:size(1), rows = index,
    target = target,
  }
  if settings.fill then
    settings.fill(batch, {
      target = target, rows = rows, sequence = sequence, start = start, index = index, lse = lse,
      x = x, w = w, bias = leaves.bias,
    })
  end
  local inner = logp:detach():requires_grad_()
  local loss, values = method.loss(batch, ops.gather(inner, index), options)
  loss:backward()
  logp:backward(inner.grad)
  local metrics = preference.metrics(preference.total({
    preference.sums(batch, loss, values, preference.seen(batch, x, w, {
      entropy = ops.gather(entropy, index), lse = lse, predicted = predicted,
    }, leaves.bias)),
  }))
  local result = {
    ["out.loss"] = loss, ["out.logp"] = logp, ["out.dlogp"] = inner.grad,
    ["out.ref_logps"] = batch.ref_logps, ["metric.num_tokens"] = x:size(1),
  }
  result["out.logps"] = values.logps
  if not batch.labels then
    local P = values.logps:numel() / 2
    result["out.chosen_logps"] = values.logps:narrow(1, 1, P)
    result["out.rejected_logps"] = values.logps:narrow(1, P + 1, P)
  end
  for name, value in pairs(metrics) do
    result["metric." .. name] = value
  end
  return golden.gradients(result, leaves)
end

return M
