-- The vocabulary's head: log-probabilities and losses of hidden states, which never hold all their
-- logits, and the draw of a token. The backwards need more than a shape line can say.
local arithmetic = require("liger.arithmetic")
local autograd = require("liger.autograd")
local create = require("liger.create")
local gradient = require("liger.gradient")
local lib = require("liger.ffi")
local logits = require("liger.logits")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")
local with_defaults = require("liger.options").plain

local M = {}

local LOGPROB_DEFAULTS = {
  bias = false, -- [V], or none
  temperature = 1,
  softcap = 0, -- 0: none
  ignore = -100, -- targets that take no part
  -- bytes of logits that may be kept for the backward; above it they are recomputed
  logits_budget = 2 ^ 29,
  predicted = false, -- whether to give it too
}
local CROSS_ENTROPY_DEFAULTS = {
  bias = false, softcap = 0, ignore = -100,
  scale = false, -- of every row; default: a mean
  class_weight = false, -- [V], or none
  label_smoothing = 0,
  z_loss = 0, -- times lse^2
  token_scaling = false, -- rows count by the probability of their target, a constant
}
local DISTILL_DEFAULTS = {
  bias = false, teacher_bias = false, softcap = 0, teacher_softcap = 0, ignore = -100,
  divergence = "tvd", -- tvd, jsd or cosine
  beta = 0.5, -- of jsd; 0: KL(teacher || student), 1: KL(student || teacher)
  temperature = 1, -- of the divergence; the cross entropy's is 1
  weight_hard = false, weight_soft = false,
}
local TOPK_DEFAULTS = {}
for key, value in pairs(DISTILL_DEFAULTS) do
  if not key:find("^teacher_") then
    TOPK_DEFAULTS[key] = value
  end
end
local SAMPLE_DEFAULTS = { seed = 0, top_k = 0, top_p = 1, min_p = 0, greedy = false }

local function edge_of(x)
  return autograd.state.recording and x and x.edge or false
end

local function acc_dtype(x)
  return x.dtype == "f64" and "f64" or "f32"
end

local function count(ids, n, ignore)
  local kept = 0
  for i = 0, n - 1 do
    if ids[i] ~= ignore then
      kept = kept + 1
    end
  end
  return kept
end

-- How many targets are not `ignore`, which the operators need not wait for then; -1 where the host
-- does not know. Heads over the same targets count a mirror once: only an upload changes it. The
-- CPU's own memory is counted each time, as data() lets anyone write there.
local function known_kept(target, ignore)
  if not Tensor.is(target) or target.dtype ~= "i32" or target.storage.dead then
    return -1 -- the operator says so, if it is wrong
  end
  local ids, storage = target:upload():known(), target.storage
  if not ids then
    return -1
  end
  local counted = storage.counted
  if not counted or counted.mirror ~= storage.mirror or counted.ignore ~= ignore then
    counted = {
      mirror = storage.mirror, ignore = ignore, kept = count(ids, target:numel(), ignore),
    }
    storage.counted = storage.mirror ~= true and counted or nil
  end
  return counted.kept
end

local function linear_logprob_backward(node)
  local o = node.options
  local dlogp = gradient.incoming(node.out_logp, true)
  local dentropy = gradient.incoming(node.out_entropy, false)
  local dx, dx_add = gradient.dest(node[1], false)
  local dw, dw_add = gradient.sum_dest(node[2])
  local db, db_add = gradient.sum_dest(node[3])
  ops.raw.linear_logprob_backward(
    dlogp, dentropy, node.x, node.w, o.bias, node.target, dentropy and node.entropy, node.lse,
    o.temperature, o.softcap, o.ignore, node.z, dx, dw, db
  )
  if dx_add then gradient.settle(node[1], dx) end
  if dw_add then gradient.settle(node[2], dw) end
  if db_add then gradient.settle(node[3], db) end
end

--- Log-probability of each target under softmax(x w^T), without the [N,V] logits beyond a chunk or
--- the budget.
---@param x liger.Tensor       [N,C] hidden states
---@param w liger.Tensor       [V,C]
---@param target liger.Tensor  [N] i32; -100: no target, outputs 0
---@param options? table       bias, temperature, softcap, ignore, logits_budget (bytes), predicted
---@return liger.Tensor logp    [N], nats
---@return liger.Tensor entropy [N], nats
---@return liger.Tensor lse     [N]; takes no gradient
---@return liger.Tensor|nil predicted  [N] i32, where it is asked for: the likeliest id, of equals
---   the smallest; -1: no target
function M.linear_logprob(x, w, target, options)
  local o = with_defaults("linear_logprob", LOGPROB_DEFAULTS, options)
  local edges = { edge_of(x), edge_of(w), edge_of(o.bias) }
  local wanted = edges[1] or edges[2] or edges[3]
  local N, acc = x.shape[1] or 0, acc_dtype(x)
  local logp, entropy, lse =
    Tensor.empty({ N }, acc), Tensor.empty({ N }, acc), Tensor.empty({ N }, acc)
  local predicted, z = o.predicted and Tensor.empty({ N }, "i32") or nil, nil
  if wanted and N * (w.shape[1] or 0) * Tensor.dtype_bytes[acc] <= o.logits_budget then
    z = Tensor.empty({ N, w.shape[1] }, acc)
  end
  ops.raw.linear_logprob(
    x, w, o.bias, target, o.temperature, o.softcap, o.ignore, known_kept(target, o.ignore), logp,
    entropy, lse, predicted, z
  )
  if wanted then
    local node = autograd.new_node(linear_logprob_backward, edges)
    node.x, node.w, node.target, node.options, node.z = x, w, target, o, z
    node.lse, node.entropy = lse, entropy
    node.out_logp = autograd.new_edge(node, logp)
    node.out_entropy = autograd.new_edge(node, entropy)
  end
  return logp, entropy, lse, predicted
end

-- ---- heads whose forward makes the gradients ----

local function made_gradient_backward(node)
  local dy = gradient.incoming(node.out_loss, true)
  if not dy.is_seed and dy:item() ~= 1 then
    lib.raise(
      ("%s: gradient from above is %g, wanted 1; pass the factor as %s"):format(
        node.op, dy:item(), node.factor
      )
    )
  end
  if node.grad_x then
    gradient.give(node[1], node.grad_x)
  end
end

-- A loss whose gradients run(grad_x, grad_w, grad_b) makes: the weight's go straight into its
-- `.grad`. `factor` is the option that scales the loss.
local function with_made_gradients(op, factor, x, w, b, run)
  local edges = { edge_of(x), edge_of(w), edge_of(b) }
  for i = 2, 3 do
    if edges[i] and not edges[i].leaf then
      lib.raise(op .. ": weight or bias is computed, wanted a leaf; use linear_logprob")
    end
  end
  local grad_x = edges[1] and Tensor.empty(x.shape, x.dtype) or nil
  local loss = autograd.no_grad(
    run, grad_x, (gradient.sum_dest(edges[2])), (gradient.sum_dest(edges[3]))
  )
  if edges[1] or edges[2] or edges[3] then
    local node = autograd.new_node(made_gradient_backward, edges)
    node.op, node.factor, node.grad_x = op, factor, grad_x
    node.out_loss = autograd.new_edge(node, loss)
  end
  return loss
end

-- The number of kept rows, and of what a mean over them divides by: the sum of their class weights,
-- their number without. The op refuses a target that is no class.
local function read_kept(target, o)
  local kept, ids = known_kept(target, o.ignore), target:read()
  if kept < 0 then
    kept = count(ids, target:numel(), o.ignore)
  end
  if not o.class_weight then
    return kept, math.max(kept, 1)
  end
  local sum, weight, V = 0, o.class_weight:read(), o.class_weight:numel()
  for i = 0, target:numel() - 1 do
    local id = ids[i]
    if id ~= o.ignore and id >= 0 and id < V then
      sum = sum + weight[id]
    end
  end
  return kept, sum ~= 0 and sum or 1
end

--- scale * sum of the cross entropy of each target. The gradients are made here, in the forward:
--- the weight's go straight into its `.grad`, and the backward accepts no other factor than 1.
--- Without a scale: the mean, which divides by the class weights of the kept rows (their number
--- without weights), and the z-loss by their number.
---@param x liger.Tensor       [N,C] hidden states
---@param w liger.Tensor       [V,C]
---@param target liger.Tensor  [N] i32; -100: no target
---@param options? table       scale, class_weight ([V]), label_smoothing, z_loss (times lse^2),
---   token_scaling (dft: times the probability of the target), bias, softcap, ignore
---@return liger.Tensor loss   []
---@return { loss: liger.Tensor, entropy: liger.Tensor, predicted: liger.Tensor,
---   z_loss?: liger.Tensor } rows  [N] each; the z-loss is in the loss
function M.linear_cross_entropy(x, w, target, options)
  local o = with_defaults("linear_cross_entropy", CROSS_ENTROPY_DEFAULTS, options)
  logits.check_z_loss("linear_cross_entropy", o.z_loss)
  if o.scale and type(o.scale) ~= "number" then
    lib.raise(
      ("linear_cross_entropy: scale is %s, wanted a number"):format(tostring(o.scale))
    )
  end
  local N, acc = x.shape[1] or 0, acc_dtype(x)
  local scale, z_scale = o.scale, o.scale
  local kept
  if scale then
    kept = known_kept(target, o.ignore)
  else
    local sum
    kept, sum = read_kept(target, o)
    scale, z_scale = 1 / sum, 1 / math.max(kept, 1)
  end
  local rows = {
    loss = Tensor.empty({ N }, acc),
    entropy = Tensor.empty({ N }, acc),
    predicted = Tensor.empty({ N }, "i32"),
  }
  local function run(grad_x, grad_w, grad_b)
    local square = o.z_loss ~= 0 and Tensor.empty({ N }, acc) or nil
    ops.raw.linear_cross_entropy(
      x, w, o.bias, target, o.class_weight, scale, z_scale * o.z_loss, o.label_smoothing,
      o.token_scaling or false, o.softcap, o.ignore, kept, rows.loss, square, rows.entropy,
      rows.predicted, grad_x, grad_w, grad_b
    )
    local all = ops.affine(ops.sum(rows.loss), scale, 0)
    if square then
      rows.z_loss = ops.affine(square, o.z_loss, 0)
      rows.loss = ops.add(rows.loss, rows.z_loss)
      all = ops.add(all, ops.affine(ops.sum(square), z_scale * o.z_loss, 0))
    end
    return all
  end
  return with_made_gradients("linear_cross_entropy", "scale", x, w, o.bias, run), rows
end

local DIVERGENCES = { tvd = lib.C.LG_TVD, jsd = lib.C.LG_JSD, cosine = lib.C.LG_COSINE }

-- Both forms: run(divergence, kept, rows, ...) calls the operator, with the gradients to make last.
local function distill(op, o, x, w, target, run)
  local N, acc = x.shape[1] or 0, acc_dtype(x)
  local divergence = DIVERGENCES[o.divergence]
  if not divergence then
    lib.raise(
      ("%s: divergence is %s, wanted tvd, jsd or cosine"):format(op, tostring(o.divergence))
    )
  end
  local kept
  if o.weight_soft then
    kept = known_kept(target, o.ignore)
  else
    kept = read_kept(target, o)
    o.weight_soft = 1 / math.max(kept, 1)
  end
  local rows = {}
  for _, name in ipairs({ "hard", "soft", "entropy" }) do
    rows[name] = Tensor.empty({ N }, acc)
  end
  local function all(grad_x, grad_w, grad_b)
    for _, name in ipairs({ "hard", "soft" }) do
      local weight = o["weight_" .. name] or 0
      o["weight_" .. name] = Tensor.is(weight) and weight or create.full_like(rows[name], weight)
    end
    run(tonumber(divergence), kept, rows, grad_x, grad_w, grad_b)
    local loss
    for _, name in ipairs({ "hard", "soft" }) do
      -- An infinite term without weight is none.
      local weight = o["weight_" .. name]
      local term = ops.sum(arithmetic.where(weight, rows[name] * weight, 0))
      loss = loss and loss + term or term
    end
    return loss
  end
  return with_made_gradients(op, "weight_hard and weight_soft", x, w, o.bias, all), rows
end

--- sum over the rows of weight_hard * cross entropy + weight_soft * a divergence of a student's
--- head from a teacher's (ops.tvd, ops.jsd, ops.cosine), which is not trained. Gradients are made
--- in the forward, as in linear_cross_entropy. Heads may have unequal widths and vocabularies: the
--- losses run over the columns that both have.
---@param x liger.Tensor          [N,C] the student's hidden states
---@param w liger.Tensor          [V,C]
---@param teacher_x liger.Tensor  [N,K]
---@param teacher_w liger.Tensor  [U,K]
---@param target liger.Tensor     [N] i32; -100: takes no part
---@param options? table          divergence ("tvd", "jsd", "cosine"), beta (of jsd), temperature
---   (of the divergence), weight_hard (default 0) and weight_soft (default 1 / number of targets):
---   a number, or [N]; bias, teacher_bias, softcap, teacher_softcap, ignore
---@return liger.Tensor loss      []
---@return { hard: liger.Tensor, soft: liger.Tensor, entropy: liger.Tensor } rows  [N] each, without
---   the weights; entropy of the student at the temperature
function M.linear_distill(x, w, teacher_x, teacher_w, target, options)
  local o = with_defaults("linear_distill", DISTILL_DEFAULTS, options)
  return distill("linear_distill", o, x, w, target, function(divergence, kept, rows, ...)
    ops.raw.linear_distill(
      x, w, o.bias, teacher_x, teacher_w, o.teacher_bias, target, o.weight_hard, o.weight_soft,
      divergence, o.beta, o.temperature, o.softcap, o.teacher_softcap, o.ignore, kept, rows.hard,
      rows.soft, rows.entropy, ...
    )
  end)
end

--- linear_distill against a teacher of whom K ids a row and their log-probabilities are known: all
--- other tokens count as one more class.
---@param teacher_id liger.Tensor    [N,K] i32, distinct in a row; -1: none
---@param teacher_logp liger.Tensor  [N,K] nats, at temperature 1; -inf where there is no id
---@param options? table             of linear_distill, without those of the teacher
function M.linear_distill_topk(x, w, teacher_id, teacher_logp, target, options)
  local o = with_defaults("linear_distill_topk", TOPK_DEFAULTS, options)
  return distill("linear_distill_topk", o, x, w, target, function(divergence, kept, rows, ...)
    ops.raw.linear_distill_topk(
      x, w, o.bias, teacher_id, teacher_logp, target, o.weight_hard, o.weight_soft, divergence,
      o.beta, o.temperature, o.softcap, o.ignore, kept, rows.hard, rows.soft, rows.entropy, ...
    )
  end)
end

--- Draws a token a row.
---@param z liger.Tensor         [B,V] logits as linear_logits gives them, temperature included
---@param sequence liger.Tensor  [B] i64, the sequence's own number: the draw depends on (seed,
---   sequence, position) only
---@param position liger.Tensor  [B] i32
---@param options table          seed, top_k (0: off), top_p (1: off), min_p (0: off), greedy
---@return liger.Tensor id       [B] i32
---@return liger.Tensor logp     [B] under the whole softmax(z)
function M.sample(z, sequence, position, options)
  local o = with_defaults("sample", SAMPLE_DEFAULTS, options)
  local top_k = o.greedy and 1 or math.max(o.top_k, 0)
  return ops.sample(z, sequence, position, o.seed, top_k, o.top_p, o.min_p)
end

return M
