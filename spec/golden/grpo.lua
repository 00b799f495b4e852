local assert = require("luassert")
local golden = require("spec.golden")
local helper = require("spec.helper")
local fn = require("liger.fn")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

-- Log-probabilities and entropies of the targets, from logits or hidden states, and the leaves.
local function policy(case, target)
  local temperature, logits = case.options.temperature, golden.leaf(case, "logits")
  if logits then
    local logp, entropy = fn.logprob(logits, target, { temperature = temperature })
    return logp, entropy, { logits = logits }
  end
  local x, w, leaves = golden.head(case)
  local logp, entropy = fn.linear_logprob(x, w, target,
    { temperature = temperature, bias = leaves.bias })
  return logp, entropy, leaves
end

local function run(case)
  local grpo = require("liger.loss.grpo")
  local o = {}
  for key, value in pairs(case.options) do
    if key ~= "temperature" then
      o[key] = value
    end
  end
  local ok, options = pcall(grpo.options, o)
  if not ok then
    assert(options:find("unknown option") or options:find("loss_type is"), options)
    return false, options:match("grpo: (.*)")
  end
  if case.get("in.sampler_logp") then
    return false, "sampler"
  end
  local target = case.get("in.target", "i32")
  local logp, entropy, leaves = policy(case, target)
  local rows, sequence, start = golden.completions(case, target)
  local advantages, per_row = helper.values(case.get("in.advantages")), {}
  for k, s in ipairs(sequence) do
    per_row[k] = #advantages == #start - 1 and advantages[s + 1] or advantages[rows[k] + 1]
  end
  local function of(name)
    local values = case.get("in." .. name)
    return values and golden.picked(values, rows, case.dtype)
  end
  local batch = {
    mask = fn.ones(#rows, case.dtype), advantage = Tensor.from_table(per_row, case.dtype),
    old_logp = of("old_logp"), ref_logp = of("ref_logp"),
    sequence = Tensor.from_table(sequence, "i32"), completion_cu = Tensor.from_table(start, "i32"),
  }
  local inner = logp:detach():requires_grad_()
  local of_rows = ops.gather(inner, Tensor.from_table(rows, "i32"))
  local token_loss, parts = grpo.token_loss(batch, of_rows, options)
  local lengths, weights = {}, {}
  for s = 1, #start - 1 do
    lengths[s] = start[s + 1] - start[s]
  end
  local by_sequence = grpo.weights(lengths, options)
  for k, s in ipairs(sequence) do
    weights[k] = by_sequence[s + 1]
  end
  local loss = fn.sum(token_loss * Tensor.from_table(weights, case.dtype))
  loss:backward()
  logp:backward(inner.grad)
  local sums = #rows > 0
    and grpo.sums(batch, golden.picked(entropy, rows, case.dtype), parts, options)
  if not sums or sums.tokens == 0 then
    -- TRL logs zeros where nothing counts, here these metrics are left out.
    assert.same({}, grpo.metrics(sums or nil, options))
    sums = {
      tokens = 1, sequences = 1, entropy = 0, kl = 0, low = 0, high = 0, low_min = 0, high_max = 0,
    }
  end
  local metrics = grpo.metrics(sums, options)
  local result = {
    ["out.loss"] = loss, ["out.logp"] = logp, ["out.entropy"] = entropy, ["out.dlogp"] = inner.grad,
    ["out.dentropy"] = fn.full_like(logp, 0),
  }
  for name, value in pairs(metrics) do
    result["metric." .. name] = value
  end
  return golden.gradients(result, leaves)
end

return { compared = 12, run = run }
