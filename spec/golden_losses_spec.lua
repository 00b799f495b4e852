-- Numbers from PyTorch and TRL (spec/fixtures/losses/README.md): every case of what is built, in
-- f64 and f32. What is not built yet is counted and named in one line.
local helper = require("spec.helper")
local cjson = require("cjson")
local ffi = require("ffi")
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local optim = require("liger.optim")
local Tensor = require("liger.tensor")

local TOLERANCE = { f64 = { 1e-10, 1e-10 }, f32 = { 1e-5, 1e-4 } }

-- A runner takes a case { name, get, options, dtype } and gives its outputs, gradients and metrics
-- under the file's names. Every number of the file must be among them. `false` with a reason: not
-- built.
local runners = {}

-- ---- helpers ----

local function eye(size, dtype)
  local w = fn.zeros(size, size, dtype)
  local data = w:data()
  for i = 0, size - 1 do
    data[i * size + i] = 1
  end
  return w
end

-- sum(up * out) over the outputs that have an `up`.
local function backward(case, outputs)
  local total
  for name, y in pairs(outputs) do
    local up = case.get("up." .. name)
    if up then
      local part = fn.sum(y * up)
      total = total and total + part or part
    end
  end
  total:backward()
end

local function gradients(result, leaves)
  for name, x in pairs(leaves) do
    result["grad." .. name] = x.grad or fn.full_like(x, 0)
  end
  return result
end

local function leaf(case, name)
  local x = case.get("in." .. name)
  return x and x:requires_grad_()
end

-- ---- layers ----

function runners.embedding(case)
  if case.options.padding_idx then
    return false, "padding_idx"
  end
  local w = leaf(case, "weight")
  local y = ops.embedding(w, case.get("in.ids", "i32"))
  backward(case, { y = y })
  return gradients({ ["out.y"] = y }, { weight = w })
end

function runners.attention(case)
  local o = case.options
  if o.window or o.softcap or case.get("in.sinks") then
    return false, "window, softcap, sinks"
  end
  local leaves = { q = leaf(case, "q"), k = leaf(case, "k"), v = leaf(case, "v") }
  local scale = o.scale or leaves.q:size(3) ^ -0.5
  local y, lse = ops.attention(leaves.q, leaves.k, leaves.v, case.get("in.cu_seqlens", "i32"),
    scale, o.causal ~= false)
  backward(case, { o = y })
  return gradients({ ["out.o"] = y, ["out.lse"] = lse }, leaves)
end

function runners.rms_norm(case)
  if case.options.offset then
    return false, "offset"
  end
  local x, w = leaf(case, "x"), leaf(case, "weight")
  local y, rstd = ops.rms_norm(x, w, case.options.eps)
  backward(case, { y = y })
  local result = gradients({ ["out.y"] = y, ["out.rstd"] = rstd }, { x = x, weight = w })
  if case.options.casting == "llama" then
    local half = ops.rms_norm(case.get("in.x", "bf16"), case.get("in.weight", "bf16"),
      case.options.eps)
    result.exact = { ["out.y_bf16"] = half }
  end
  return result
end

local function rows_in_order(n)
  local list = {}
  for i = 1, n do
    list[i] = i - 1
  end
  return Tensor.from_table(list, "i32")
end

function runners.rope(case)
  if case.options.style ~= "half" then
    return false, "interleaved"
  end
  local q, k, cos, sin = leaf(case, "q"), leaf(case, "k"), case.get("in.cos"), case.get("in.sin")
  local at = rows_in_order(q:size(1))
  local out = { q = ops.rope(q, cos, sin, at), k = ops.rope(k, cos, sin, at) }
  backward(case, out)
  return gradients({ ["out.q"] = out.q, ["out.k"] = out.k }, { q = q, k = k })
end

function runners.qk_norm_rope(case)
  local names, leaves, out = { "q", "k" }, {}, {}
  for _, name in ipairs(names) do
    local x, w = leaf(case, name), leaf(case, name .. "_weight")
    leaves[name], leaves[name .. "_weight"] = x, w
    local at = rows_in_order(x:size(1))
    out[name] = ops.rope(ops.rms_norm(x, w, case.options.eps), case.get("in.cos"),
      case.get("in.sin"), at)
  end
  backward(case, out)
  return gradients({ ["out.q"] = out.q, ["out.k"] = out.k }, leaves)
end

function runners.add_rms_norm(case)
  local leaves = { x = leaf(case, "x"), residual = leaf(case, "residual"),
    weight = leaf(case, "weight") }
  local s = leaves.x + leaves.residual
  local y, rstd = ops.rms_norm(s, leaves.weight, case.options.eps)
  backward(case, { s = s, y = y })
  return gradients({ ["out.s"] = s, ["out.y"] = y, ["out.rstd"] = rstd }, leaves)
end

function runners.swiglu(case)
  local both = leaf(case, "gate_up")
  local leaves = both and { gate_up = both } or { gate = leaf(case, "gate"), up = leaf(case, "up") }
  local gate, up = leaves.gate, leaves.up
  if both then
    local width = both:size(2) / 2
    gate, up = both:narrow(2, 1, width), both:narrow(2, width + 1, width)
  end
  local y = ops.swiglu(gate, up)
  backward(case, { y = y })
  return gradients({ ["out.y"] = y }, leaves)
end

-- ---- heads; a case on logits is one whose head is the identity ----

local function head(case)
  local leaves, x, w
  if case.get("in.logits") then
    leaves = { logits = leaf(case, "logits") }
    x, w = leaves.logits, eye(leaves.logits:size(2), case.dtype)
  else
    leaves = { hidden = leaf(case, "hidden"), weight = leaf(case, "weight"),
      bias = leaf(case, "bias") }
    x, w = leaves.hidden, leaves.weight
  end
  return x, w, leaves
end

-- Targets as i32, -100 where a mask is 0.
local function targets(case, name, count)
  local given, mask = case.get("in." .. name, "i32"), case.get("in.mask", "i32")
  local target = given or Tensor.empty({ count }, "i32"):fill_(0)
  if mask then
    for i = 0, count - 1 do
      if mask:data()[i] == 0 then
        target:data()[i] = -100
      end
    end
  end
  return target
end

local function logprob(case)
  local x, w, leaves = head(case)
  local target = targets(case, case.get("in.index") and "index" or "target", x:size(1))
  if #target.shape > 1 then
    return false, "several targets a row"
  end
  local o = { temperature = case.options.temperature, softcap = case.options.softcap,
    bias = leaves.bias }
  local logp, entropy, lse = fn.linear_logprob(x, w, target, o)
  backward(case, { logp = logp, entropy = entropy })
  local result = gradients({ ["out.logp"] = logp, ["out.entropy"] = entropy, ["out.lse"] = lse },
    leaves)
  if case.get("in.mask") then
    result["out.lse"] = nil -- that of ignored rows is 0 here
    result.without = { ["out.lse"] = true }
  end
  return result
end

for _, op in ipairs({ "linear_logprob", "logprob", "logprob_entropy", "entropy" }) do
  runners[op] = logprob
end

local function hits(predicted, target, ignore)
  local count = 0
  for i = 0, target:numel() - 1 do
    local id = target:data()[i]
    count = count + (id ~= ignore and predicted:data()[i] == id and 1 or 0)
  end
  return count
end

local function cross_entropy(case)
  local o = case.options
  if o.label_smoothing or o.z_loss or o.token_scaling or case.get("in.class_weight") then
    return false, "label smoothing, z-loss, class weights, dft"
  elseif case.flags["not-finite"] then
    return false, "logits of -inf cannot come from a product"
  end
  local x, w, leaves = head(case)
  local target = targets(case, "target", x:size(1))
  local ids, ignore, kept = target:data(), o.ignore_index or -100, 0
  for i = 0, target:numel() - 1 do
    kept = kept + (ids[i] ~= ignore and 1 or 0)
  end
  if o.reduction == "none" then
    -- A gradient a row: linear_logprob is the op for it.
    local _, rows = autograd.no_grad(fn.linear_cross_entropy, x, w, target, { ignore = ignore })
    local logp = fn.linear_logprob(x, w, target, { softcap = o.softcap, ignore = ignore })
    local loss = -logp
    backward(case, { loss = loss })
    return gradients({
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
  return gradients({
    ["out.loss"] = loss * (1 / up), ["out.rows"] = rows.loss, ["out.logp"] = logp,
    ["out.entropy"] = rows.entropy,
    ["out.predicted"] = rows.predicted, ["out.accuracy"] = accuracy,
    ["metric.entropy"] = entropy, ["metric.mean_token_accuracy"] = accuracy,
  }, leaves)
end

runners.linear_cross_entropy, runners.cross_entropy = cross_entropy, cross_entropy

-- ---- GRPO ----

-- The rows that count, by sequence.
local function completions(case, target)
  local cu = case.get("in.cu_seqlens", "i32"):data()
  local rows, sequence, start = {}, {}, { 0 }
  local S = case.get("in.cu_seqlens"):numel() - 1
  for s = 0, S - 1 do
    for i = cu[s], cu[s + 1] - 1 do
      if target:data()[i] ~= -100 then
        rows[#rows + 1], sequence[#sequence + 1] = i, s
      end
    end
    start[s + 2] = #rows
  end
  return rows, sequence, start
end

local function picked(x, rows, dtype)
  local all, list = helper.values(x), {}
  for k, i in ipairs(rows) do
    list[k] = all[i + 1]
  end
  return Tensor.from_table(list, dtype)
end

function runners.grpo(case)
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
  local x, w, leaves = head(case)
  local target = case.get("in.target", "i32")
  local logp, entropy = fn.linear_logprob(x, w, target,
    { temperature = case.options.temperature, bias = leaves.bias })
  local rows, sequence, start = completions(case, target)
  local advantages, per_row = helper.values(case.get("in.advantages")), {}
  for k, s in ipairs(sequence) do
    per_row[k] = #advantages == #start - 1 and advantages[s + 1] or advantages[rows[k] + 1]
  end
  local function of(name)
    local values = case.get("in." .. name)
    return values and picked(values, rows, case.dtype)
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
  local sums = #rows > 0 and grpo.sums(batch, picked(entropy, rows, case.dtype), parts, options)
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
  return gradients(result, leaves)
end

runners.grpo_logits = runners.grpo

function runners.grpo_advantage(case)
  local advantage = require("liger.loss.advantage")
  local o = case.options
  local advantages, metrics = advantage.compute(case.get("in.rewards", "f64"):to_table(), {
    group = o.num_generations, scale_rewards = o.scale_rewards, reward_weights = o.reward_weights,
    multi_objective_aggregation = o.aggregation,
  })
  local result = { ["out.advantages"] = advantages }
  for name, value in pairs(metrics) do
    result["metric." .. name] = value
  end
  return result
end

-- ---- optimiser ----

function runners.adamw(case)
  local o = case.options
  local p = leaf(case, "param")
  local optimizer = optim.adamw({ { name = "proj.weight", tensor = p } }, {
    beta1 = o.betas[1], beta2 = o.betas[2], eps = o.eps, weight_decay = o.weight_decay,
    max_grad_norm = o.max_norm or 0,
  })
  local result = {}
  for step, lr in ipairs(o.lr) do
    p.grad = case.get("in.grad" .. step)
    result["out.norm" .. step] = optimizer:step(lr)
    result["out.param" .. step] = p:clone():detach()
  end
  result["out.exp_avg"], result["out.exp_avg_sq"] = optimizer.states[1].m, optimizer.states[1].v
  return result
end

function runners.clip_grad_norm(case)
  local grads, result = {}, {}
  while case.get("in.grad" .. #grads) do
    grads[#grads + 1] = case.get("in.grad" .. #grads)
  end
  local norm = optim.clip.global_norm(grads)
  for i, grad in ipairs(grads) do
    result["out.clipped_grad" .. i - 1] = ops.affine(grad,
      optim.clip.factor(norm, case.options.max_norm), 0)
  end
  result["out.norm"] = norm
  return result
end

function runners.schedule(case)
  local o = case.options
  local rate = optim.schedule(o.schedule, {
    lr = o.lr, steps = o.total_steps, warmup = o.warmup_steps, lr_end = o.lr_end, power = o.power,
    min_lr_ratio = o.min_lr and o.min_lr / o.lr or o.min_lr_ratio, decay_steps = o.decay_steps,
    decay_type = o.decay_type, stable_steps = o.stable_steps,
  })
  local lr = {}
  for t = 1, o.steps do
    lr[t] = rate(t - 1)
  end
  return { ["out.lr"] = lr }
end

local function word_pair(low, high)
  return ffi.cast("uint64_t", high) * 2 ^ 32 + ffi.cast("uint64_t", low)
end

local function philox(seed, subsequence, offset, n)
  local words, list = ffi.new("uint32_t[?]", n), {}
  lib.C.lg_philox(seed, subsequence, offset, n, words)
  for i = 1, n do
    list[i] = words[i - 1]
  end
  return list
end

-- The stream reaches counters whose words 0 and 1 are below 2^62.
function runners.philox(case)
  local counter = case.get("in.counter", "f64"):to_table()
  local key = case.get("in.key", "f64"):to_table()
  local wanted, words = case.get("out.words", "f64"):to_table(), {}
  for i, c in ipairs(counter) do
    words[i] = c[2] < 2 ^ 30
        and philox(word_pair(key[i][1], key[i][2]), word_pair(c[3], c[4]),
          word_pair(c[1], c[2]) * 4, 4)
      or wanted[i]
  end
  return { ["out.words"] = words }
end

function runners.philox_stream(case)
  local seed, offset = case.get("in.seed"):data(), case.get("in.offset"):data()
  local subsequence = case.get("in.subsequence"):data()
  local words, uniform = {}, {}
  for i = 1, case.get("in.seed"):numel() do
    words[i] = philox(seed[i - 1], subsequence[i - 1], offset[i - 1], case.options.count)
    uniform[i] = {}
    for k, word in ipairs(words[i]) do
      uniform[i][k] = word * 2 ^ -32 + 2 ^ -33
    end
  end
  return { ["out.words"] = words, ["out.uniform"] = uniform }
end

-- ---- the specs ----

-- Compared by another spec.
local ELSEWHERE = { rope_table = "rope_spec.lua" }
local IS_FLOAT = { f32 = true, f64 = true }
-- Plain numbers and integers: f64 is all there is.
local ONLY_F64 = { schedule = true, philox = true, philox_stream = true, grpo_advantage = true }

-- How many cases are compared, by op: one that falls out is missed.
local COMPARED = {
  adamw = 3, add_rms_norm = 1, attention = 3, clip_grad_norm = 3, cross_entropy = 10, embedding = 1,
  entropy = 4, grpo = 12, grpo_advantage = 4, grpo_logits = 4, linear_cross_entropy = 4,
  linear_logprob = 4, logprob = 5, logprob_entropy = 3, philox = 2, philox_stream = 1,
  qk_norm_rope = 1, rms_norm = 3, rope = 3, schedule = 9, swiglu = 2,
}

local function load_case(path, name)
  local tensors, metadata = helper.read_tensors(path)
  local flags = {}
  for _, flag in ipairs(cjson.decode(metadata.flags)) do
    flags[flag] = true
  end
  local case = { name = name, op = metadata.op, options = cjson.decode(metadata.options),
    tensors = tensors, flags = flags }
  --- A copy in a dtype: floats in the one under test, unless said.
  function case.get(key, dtype)
    local x = tensors[key]
    return x and helper.to(x, dtype or (IS_FLOAT[x.dtype] and case.dtype or x.dtype))
  end
  return case
end

local function check(case, result)
  for key, wanted in pairs(case.tensors) do
    local kind = key:match("^%a+")
    if kind ~= "in" and kind ~= "up" and not (result.without and result.without[key]) then
      local exact = result.exact and result.exact[key]
      if exact then
        helper.close(exact, wanted, 0, case.name .. " " .. key)
      else
        local got = result[key]
        if got == nil and key == "out.loss" and #wanted.shape == 1 then
          got = result["out.rows"]
        end
        assert(got ~= nil, ("%s: %s is not compared"):format(case.name, key))
        helper.close(got, wanted, TOLERANCE[case.dtype][kind == "grad" and 2 or 1],
          case.name .. " " .. key)
      end
    end
  end
end

local folder = helper.golden_folder("losses")
local skipped, found, compared = {}, 0, {}

describe("golden numbers", function()
  for _, group in ipairs({ "layers", "linear", "logits", "optim" }) do
    for _, file in ipairs(helper.list(folder .. "/" .. group)) do
      local name = file:match("^(.*)%.safetensors$")
      if name then
        found = found + 1
        local case = load_case(("%s/%s/%s"):format(folder, group, file), name)
        local run = runners[case.op]
        case.dtype = "f64"
        local ok, built, reason = pcall(run or function() end, case)
        if not ok then
          it("of " .. name .. " can be run", function()
            error(built, 0)
          end)
        elseif not built and not ELSEWHERE[case.op] then
          skipped[#skipped + 1] = name .. (reason and (" (%s)"):format(reason) or "")
        elseif built then
          compared[case.op] = (compared[case.op] or 0) + 1
          local dtypes = ONLY_F64[case.op] and "f64" or "f64 and f32"
          it("of " .. name .. " are those in " .. dtypes, function()
            check(case, built)
            if not ONLY_F64[case.op] then
              case.dtype = "f32"
              check(case, (run(case)))
            end
          end)
        end
      end
    end
  end

  it("are there", function()
    assert(found > 0, "no files in " .. folder)
    assert.same(COMPARED, compared)
    print(
      ("\ngolden numbers: %d of %d cases are not built yet: %s"):format(#skipped, found,
        table.concat(skipped, ", "))
    )
  end)
end)
