local golden = require("spec.golden")
local helper = require("spec.helper")
local fn = require("liger.fn")
local grpo = require("liger.loss.grpo")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

-- The values of the counted rows, a list a sequence.
local function by_sequence(case, name, rows, sequence, count)
  local all, lists = helper.values(case.get("in." .. name)), {}
  for s = 1, count do
    lists[s] = {}
  end
  for k, s in ipairs(sequence) do
    table.insert(lists[s + 1], all[rows[k] + 1])
  end
  return lists
end

-- Samples with the sampler's ratios, and TRL's metrics of them.
local function sample(case, options, rows, sequence, count)
  local samples = {}
  local old = by_sequence(case, "old_logp", rows, sequence, count)
  for s, list in ipairs(by_sequence(case, "sampler_logp", rows, sequence, count)) do
    samples[s] = { old_logp = old[s], sampler_logp = list }
  end
  return samples, grpo.sampler_ratios(samples, options)
end

-- Values of the counted rows at their places among all rows.
local function spread(x, rows, count, dtype, otherwise)
  local values, list = helper.values(x), {}
  for i = 1, count do
    list[i] = otherwise
  end
  for k, i in ipairs(rows) do
    list[i + 1] = values[k]
  end
  return Tensor.from_table(list, dtype)
end

local function firsts(x, start)
  local values, list = helper.values(x), {}
  for s = 1, #start - 1 do
    list[s] = values[start[s] + 1]
  end
  return Tensor.from_table(list, x.dtype)
end

local function column(lists, dtype)
  local list = {}
  for _, values in ipairs(lists) do
    for _, x in ipairs(values) do
      list[#list + 1] = x
    end
  end
  return Tensor.from_table(list, dtype)
end

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
  local o = {}
  for key, value in pairs(case.options) do
    if key ~= "temperature" then
      o[key] = value
    end
  end
  local options = grpo.options(o)
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
  local lengths, weights = {}, {}
  for s = 1, #start - 1 do
    lengths[s] = start[s + 1] - start[s]
  end
  local of_sequence = grpo.weights(lengths, options)
  for k, s in ipairs(sequence) do
    weights[k] = of_sequence[s + 1]
  end
  local batch = {
    mask = fn.ones(#rows, case.dtype), advantage = Tensor.from_table(per_row, case.dtype),
    weight = Tensor.from_table(weights, case.dtype),
    old_logp = of("old_logp"), ref_logp = of("ref_logp"), sampler_logp = of("sampler_logp"),
    sequence = Tensor.from_table(sequence, "i32"), completion_cu = Tensor.from_table(start, "i32"),
  }
  local result, metrics = {}, {}
  if batch.sampler_logp then
    local samples
    samples, metrics = sample(case, options, rows, sequence, #start - 1)
    local ratios = {}
    for s, row in ipairs(samples) do
      ratios[s] = row.sampler_ratio
    end
    batch.sampler_ratio = column(ratios, case.dtype)
    result["out.sampler_ratio"] = options.sampler_mode:find("^token")
      and spread(batch.sampler_ratio, rows, target:numel(), case.dtype, 1)
      or firsts(batch.sampler_ratio, start)
  end
  local inner, inner_entropy = logp:detach():requires_grad_(), entropy:detach():requires_grad_()
  local index = Tensor.from_table(rows, "i32")
  local of_rows, entropy_rows = ops.gather(inner, index), ops.gather(inner_entropy, index)
  local _, parts = grpo.token_loss(batch, of_rows:detach(), options, entropy_rows:detach())
  local loss, part = grpo.loss(batch, of_rows, entropy_rows, options)
  loss:backward()
  local total = fn.sum(logp * inner.grad)
  if inner_entropy.grad then
    total = total + fn.sum(entropy * inner_entropy.grad)
  end
  total:backward()
  for name, value in pairs(grpo.metrics({ part }, options)) do
    metrics[name] = value
  end
  if #rows == 0 then
    -- TRL logs zeros where nothing counts, here these metrics are left out.
    assert(metrics.loss == 0 and next(metrics, next(metrics)) == nil)
    for name in pairs(case.tensors) do
      metrics[name:match("^metric%.(.*)$") or "loss"] = 0
    end
  end
  result["out.loss"], result["out.logp"], result["out.entropy"] = loss, logp, entropy
  result["out.dlogp"] = inner.grad
  result["out.dentropy"] = inner_entropy.grad or fn.full_like(logp, 0)
  result["out.phi"] = parts.phi and firsts(parts.phi, start)
  result["out.entropy_mask"] = parts.active
    and spread(parts.active, rows, target:numel(), case.dtype, 0)
  helper.close(metrics.loss, loss:item(), 1e-5)
  for name, value in pairs(metrics) do
    result["metric." .. name] = value
  end
  return golden.gradients(result, leaves)
end

return { compared = 21, run = run }
