-- Distillation of a teacher into a student, token by token. With p and q the softmaxes of student
-- and teacher logits over the temperature,
--   loss = weight_hard * cross entropy (at temperature 1) + weight_soft * soft
--   ce_tvd      soft = 1/2 sum |p - q|, and weight_hard is 1 unless given
--   tvd         the same without a hard term
--   jsd         soft = beta KL(q || m) + (1 - beta) KL(p || m), m = (1 - beta) p + beta q (Agarwal
--               et al. 2024, equation 1: GKD)
--   forward_kl  soft = KL(q || p)        reverse_kl  soft = KL(p || q)
--   cosine      soft = 1 - cos of the logits
-- summed over the targets and divided by their number in the whole batch. No T^2 factor is applied.
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local options_of = require("liger.options")
local ranks = require("liger.ranks")
local Tensor = require("liger.tensor")

local M = {}

M.defaults = {
  loss_type = "ce_tvd",
  beta = 0.5, -- of jsd
  temperature = 1, -- of both softmaxes in the soft term
  weight_hard = false, -- default 1 for ce_tvd, 0 for the others
  weight_soft = 1,
}

M.ranges = {
  loss_type = { "ce_tvd", "tvd", "jsd", "forward_kl", "reverse_kl", "cosine" },
  beta = { min = 0, max = 1, with = { "loss_type", "jsd" } },
  temperature = { above = 0 },
  weight_hard = { min = 0 }, weight_soft = { min = 0 },
}

-- The divergence of each type, and the beta that makes a KL of the jsd.
local LOSS_TYPES = {
  ce_tvd = { "tvd" }, tvd = { "tvd" }, jsd = { "jsd" }, cosine = { "cosine" },
  forward_kl = { "jsd", 0 }, reverse_kl = { "jsd", 1 },
}

--- The options with their defaults; raises on an unknown one, on a value out of range and on one
--- that the loss does not read.
---@param options? table
---@return table
function M.options(options)
  local o = options_of.over("distill", M.defaults, M.ranges, options)
  o.weight_hard = o.weight_hard or (o.loss_type == "ce_tvd" and 1 or 0)
  if o.weight_hard == 0 and o.weight_soft == 0 then
    lib.raise("distill: weight_hard and weight_soft are 0, wanted one above")
  end
  return o
end

--- The loss of a micro-batch, its gradients made in the same pass. The teacher is a model, whose
--- hidden states are computed here without a graph, or the batch's own teacher_id and
--- teacher_logp, see data/teacher.lua.
---@param student liger.Decoder
---@param teacher liger.Decoder|nil
---@param batch liger.Pack
---@param options table    of options()
---@param scale number     1 / targets of the whole batch
---@return liger.Tensor loss  []
---@return { hard: liger.Tensor, soft: liger.Tensor, entropy: liger.Tensor } rows  [N] each, in nats
function M.loss(student, teacher, batch, options, scale)
  local divergence, beta = unpack(LOSS_TYPES[options.loss_type])
  local o = {
    divergence = divergence, beta = beta or options.beta, temperature = options.temperature,
    weight_hard = options.weight_hard * scale, weight_soft = options.weight_soft * scale,
  }
  local w = student.weights.head
  if not teacher then
    return fn.linear_distill_topk(
      student:hidden(batch), w, batch.teacher_id, batch.teacher_logp, batch.target, o
    )
  end
  local teacher_x = autograd.no_grad(teacher.hidden, teacher, batch)
  return fn.linear_distill(
    student:hidden(batch), w, teacher_x, teacher.weights.head, batch.target, o
  )
end

local NAMES = { "hard", "soft", "entropy", "tokens" }

local function sums(batch, rows)
  local dtype = rows.hard.dtype
  local mask, y = fn.ge(batch.target:to(dtype), 0), Tensor.empty({ #NAMES }, dtype)
  for i, name in ipairs(NAMES) do
    ops.raw.sum(rows[name] and fn.where(mask, rows[name], 0) or mask, y:row(i))
  end
  return y
end

--- What the log needs of a micro-batch, left on the device until the step ends.
---@param batch liger.Pack
---@param rows table  of loss()
---@return liger.Tensor  [4], for total()
function M.sums(batch, rows)
  return autograd.no_grad(sums, batch, rows)
end

--- Sums over the targets of all micro-batches of all processes. Waits for the device once.
---@param parts liger.Tensor[]  of sums()
---@return { hard: number, soft: number, entropy: number, tokens: integer }
function M.total(parts)
  local data, total = #parts > 0 and Tensor.read_all(parts), {}
  for i, name in ipairs(NAMES) do
    total[name] = 0
    for p = 0, #parts - 1 do
      total[name] = total[name] + data[p * #NAMES + i - 1]
    end
  end
  return ranks.sum(total)
end

--- Metrics from the total of all micro-batches; 0 where there was no target. hard_loss is the cross
--- entropy at temperature 1, entropy that of the student at the loss's temperature.
---@param total table    of total()
---@param options table
---@return { loss: number, hard_loss: number, soft_loss: number, entropy: number }
function M.metrics(total, options)
  local tokens = math.max(total.tokens, 1)
  local function weighted(weight, sum)
    return weight == 0 and 0 or weight * sum / tokens
  end
  return {
    loss = weighted(options.weight_hard, total.hard) + weighted(options.weight_soft, total.soft),
    hard_loss = total.hard / tokens, soft_loss = total.soft / tokens,
    entropy = total.entropy / tokens,
  }
end

return M
