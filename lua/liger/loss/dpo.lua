-- DPO (Rafailov et al. 2023, equation 7) and its kin, with TRL's names, defaults and formulas. The
-- sequences are pairs, all chosen ones first. s = log p - log p_ref of an answer, and its score f:
--   reverse_kl s, forward_kl 1 - e^-s, js_divergence ln 2 + log S(s),
--   alpha_divergence (e^((a-1) s) - 1) / (a - 1)          (Wang et al. 2024, table 1)
-- c, r: s of the chosen and the rejected answer; d: difference of their scores, m: of their scores
-- divided by length; b = beta, e = label_smoothing, S the sigmoid, q = S(b d):
--   sigmoid       -(1-e) log S(b d) - e log S(-b d)       sigmoid_norm  -log S(b m)
--   robust        (-(1-e) log S(b d) + e log S(-b d)) / (1-2e)
--   hinge         max(0, 1 - b d)                         ipo        (m - 1/(2b))^2
--   exo_pair      q (log q - log(1-e)) + (1-q) (log(1-q) - log e)
--   nca_pair      -log S(b c) - log S(-b c) / 2 - log S(-b r) / 2
--   bco_pair      -log S(b c) - log S(-b r)               apo_zero   1 - S(b c) + S(b r)
--   sppo_hard     (c - 1/(2b))^2 + (r + 1/(2b))^2         apo_down   S(b c) + 1 - S(b (c - r))
--   discopop      -(1-g) log S(b d) + g e^(-b d), g = S(b d / discopop_tau)
--   aot           sigmoid of sort(log p differences) - sort(log p_ref differences)
--   aot_unpaired  sigmoid of sort(c) - sort(r)
--   sft           -log p of the chosen answers over their tokens
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local options_of = require("liger.options")
local pack = require("liger.nn.pack")
local ranks = require("liger.ranks")
local Tensor = require("liger.tensor")

local M = {}

-- e^x is capped here, its gradient then 0: fp32 overflows at 88.
local MAX_EXPONENT = 80

M.defaults = {
  loss_type = "sigmoid", -- or several, "sigmoid,sft", which are summed
  loss_weights = false, -- a number each, "0.8,1"; default: 1
  beta = 0.1,
  label_smoothing = 0, -- share of pairs whose labels are taken to be swapped
  f_divergence_type = "reverse_kl",
  f_alpha_divergence_coef = 0.5, -- a of the alpha divergence
  ld_alpha = false, -- weight of tokens beyond the length of the pair's shorter answer; none: 1
  use_weighting = false, -- WPO: weigh pairs by how likely the policy is to produce them
  discopop_tau = 0.05,
  reference_free = false, -- log p_ref is 0
}

M.ranges = {
  beta = { above = 0 }, ld_alpha = { min = 0, max = 1 },
  label_smoothing = {
    min = 0, max = 0.5,
    with = { "loss_type", "sigmoid", "exo_pair", "robust", "aot", "aot_unpaired" },
  },
  f_divergence_type = {
    "reverse_kl", "forward_kl", "js_divergence", "alpha_divergence",
    with = {
      "loss_type", "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop",
    },
  },
  f_alpha_divergence_coef = { with = { "f_divergence_type", "alpha_divergence" } },
  discopop_tau = { above = 0, with = { "loss_type", "discopop" } },
}

-- ---- scores ----

local function capped_exp(x)
  return x:clamp(-math.huge, MAX_EXPONENT):exp()
end

local SCORE = {
  reverse_kl = function(s)
    return s
  end,
  forward_kl = function(s)
    return 1 - capped_exp(-s)
  end,
  js_divergence = function(s)
    return s:log_sigmoid() + math.log(2)
  end,
  alpha_divergence = function(s, options)
    local a = options.f_alpha_divergence_coef - 1
    return (capped_exp(s * a) - 1) / a
  end,
}

-- ---- losses: of v.c, v.r, v.d, v.m (see above), [P] each ----

local function logistic(x, smoothing)
  local loss = -x:log_sigmoid()
  if smoothing == 0 then
    return loss
  end
  return loss * (1 - smoothing) - (-x):log_sigmoid() * smoothing
end

-- The values in ascending order, equal ones as they stood; with a NaN among them, as they all
-- stood.
local function sorted(x)
  local values, order = x:detach():to_table(), {}
  for i, value in ipairs(values) do
    if value ~= value then
      return x
    end
    order[i] = i
  end
  table.sort(order, function(i, j)
    if values[i] ~= values[j] then
      return values[i] < values[j]
    end
    return i < j
  end)
  for i, place in ipairs(order) do
    order[i] = place - 1
  end
  return ops.gather(x, Tensor.from_table(order, "i32"))
end

local LOSS = {}

function LOSS.sigmoid(v, o)
  return logistic(v.d * o.beta, o.label_smoothing)
end

function LOSS.sigmoid_norm(v, o)
  return logistic(v.m * o.beta, 0)
end

function LOSS.robust(v, o)
  local x, e = v.d * o.beta, o.label_smoothing
  return ((-x):log_sigmoid() * e - x:log_sigmoid() * (1 - e)) / (1 - 2 * e)
end

function LOSS.hinge(v, o)
  local x = 1 - v.d * o.beta
  return x * fn.gt(x, 0)
end

function LOSS.ipo(v, o)
  return (v.m - 1 / (2 * o.beta)) ^ 2
end

function LOSS.exo_pair(v, o)
  local x, e = v.d * o.beta, o.label_smoothing
  return x:sigmoid() * (x:log_sigmoid() - math.log(1 - e))
    + (-x):sigmoid() * ((-x):log_sigmoid() - math.log(e))
end

function LOSS.nca_pair(v, o)
  local c, r = v.c * o.beta, v.r * o.beta
  return -c:log_sigmoid() - (-c):log_sigmoid() / 2 - (-r):log_sigmoid() / 2
end

function LOSS.bco_pair(v, o)
  return -(v.c * o.beta):log_sigmoid() - (v.r * -o.beta):log_sigmoid()
end

function LOSS.sppo_hard(v, o)
  local half = 1 / (2 * o.beta)
  return (v.c - half) ^ 2 + (v.r + half) ^ 2
end

function LOSS.apo_zero(v, o)
  return (v.c * -o.beta):sigmoid() + (v.r * o.beta):sigmoid()
end

function LOSS.apo_down(v, o)
  return (v.c * o.beta):sigmoid() + ((v.c - v.r) * -o.beta):sigmoid()
end

function LOSS.discopop(v, o)
  local x = v.d * o.beta
  local mix = (x / o.discopop_tau):sigmoid()
  return capped_exp(-x) * mix - x:log_sigmoid() * (1 - mix)
end

function LOSS.aot(v, o)
  local c, r = pack.halves(v.logps)
  local ref_c, ref_r = pack.halves(v.ref_logps)
  return logistic((sorted(c - r) - sorted(ref_c - ref_r)) * o.beta, o.label_smoothing)
end

function LOSS.aot_unpaired(v, o)
  return logistic((sorted(v.c) - sorted(v.r)) * o.beta, o.label_smoothing)
end

-- ---- options ----

local SORTED = { aot = true, aot_unpaired = true }

local NAMES = "sigmoid, sigmoid_norm, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, "
  .. "aot, aot_unpaired, apo_zero, apo_down, discopop or sft"

local function list_of(value)
  if type(value) ~= "string" then
    return type(value) == "table" and value or { value or nil }
  end
  local list = {}
  for item in value:gmatch("[^,%s]+") do
    list[#list + 1] = item
  end
  return list
end

local function losses_of(given)
  local names = list_of(given.loss_type == nil and M.defaults.loss_type or given.loss_type)
  local weights, losses = list_of(given.loss_weights), {}
  if #names == 0 then
    lib.raise("dpo: loss_type is empty, wanted " .. NAMES)
  elseif #weights > 0 and #weights ~= #names then
    lib.raise(
      ("dpo: loss_weights has %d numbers, wanted one for each of %d losses"):format(
        #weights, #names
      )
    )
  end
  for i, name in ipairs(names) do
    if not LOSS[name] and name ~= "sft" then
      lib.raise(("dpo: loss_type is %s, wanted %s"):format(tostring(name), NAMES))
    end
    local weight = tonumber(weights[i] or 1)
    if not weight or weight - weight ~= 0 then
      lib.raise(("dpo: loss_weights has %s, wanted a number"):format(tostring(weights[i])))
    end
    losses[i] = { name = name, weight = weight }
  end
  return losses
end

--- The options with their defaults; raises on an unknown one, on a value out of range and on one
--- that the losses do not read.
---@param options? table  loss_type and loss_weights as text with commas, or as lists
---@return table  with losses { name, weight } and is_sorted: the losses need the batch whole
function M.options(options)
  local given = {}
  for key, value in pairs(options or {}) do
    given[key] = value
  end
  local losses, names = losses_of(given), {}
  for i, loss in ipairs(losses) do
    names[i] = loss.name
  end
  given.loss_type, given.loss_weights = table.concat(names, ","), nil
  local o = options_of.over("dpo", M.defaults, M.ranges, given)
  o.losses = losses
  if o.f_alpha_divergence_coef == 1 then
    lib.raise("dpo: f_alpha_divergence_coef is 1, wanted another number")
  end
  for _, loss in ipairs(losses) do
    local name, e = loss.name, o.label_smoothing
    o.is_sorted = o.is_sorted or SORTED[name]
    if o.is_sorted and ranks.size > 1 then
      lib.raise(
        ("dpo: %s sorts the whole batch, wanted 1 process, got %d"):format(name, ranks.size)
      )
    end
    if name == "exo_pair" and e == 0 or name == "robust" and e == 0.5 then
      lib.raise(
        ("dpo: label_smoothing is %g, wanted a number %s with loss_type %s"):format(
          e, e == 0 and "above 0" or "below 0.5", name
        )
      )
    elseif o.use_weighting and (SORTED[name] or name == "sft") then
      lib.raise(
        ("dpo: use_weighting is true, wanted false with loss_type %s, which has no pairs"):format(
          name
        )
      )
    end
  end
  return o
end

-- ---- the loss of a batch ----

-- 1 up to the length of the pair's shorter answer, ld_alpha beyond.
local function length_weights(cu, ld_alpha, dtype)
  local start, list = cu:read(), {}
  local S = cu:numel() - 1
  local P = S / 2
  local function length(s)
    return start[s + 1] - start[s]
  end
  for s = 0, S - 1 do
    local shared = math.min(length(s), length((s + P) % S))
    for j = 1, length(s) do
      list[#list + 1] = j <= shared and 1 or ld_alpha
    end
  end
  return Tensor.from_table(list, dtype)
end

--- Log-probability of each answer, the tokens beyond the shared length weighted by ld_alpha: of the
--- policy, and of the reference for batch.ref_logps.
---@param batch table        completion_cu [2P+1] i32
---@param logp liger.Tensor  [K]
---@param options table      of options()
---@return liger.Tensor      [2P]
function M.logps(batch, logp, options)
  if options.ld_alpha then
    logp = logp * length_weights(batch.completion_cu, options.ld_alpha, logp.dtype)
  end
  return ops.segment_sum(logp, batch.completion_cu)
end

-- WPO (Zhou et al. 2024, equation 2): e^(mean of log p - log sum p^2 over the answer), of both
-- answers together. No gradient.
local function pair_weights(batch, logp)
  if not batch.log_p2 then
    lib.raise("dpo: use_weighting is true and the batch has no log_p2")
  end
  local c, r = pack.halves(fn.segment_mean(logp - batch.log_p2, batch.completion_cu))
  return (c + r):exp()
end

local function reference_of(batch, logps, options)
  if options.reference_free then
    return fn.full_like(logps, 0)
  elseif not batch.ref_logps then
    lib.raise("dpo: the batch has no ref_logps, wanted them or reference_free")
  end
  return batch.ref_logps
end

local function values_of(batch, logp, options)
  local v = { logps = M.logps(batch, logp, options) }
  v.ref_logps = reference_of(batch, v.logps, options)
  local ratio = v.logps - v.ref_logps
  local score = SCORE[options.f_divergence_type](ratio, options)
  v.c, v.r = pack.halves(ratio)
  local chosen, rejected = pack.halves(score)
  v.d = chosen - rejected
  local start, inverse = batch.completion_cu:read(), {}
  for s = 1, batch.completion_cu:numel() - 1 do
    inverse[s] = 1 / math.max(start[s] - start[s - 1], 1)
  end
  chosen, rejected = pack.halves(score * Tensor.from_table(inverse, logp.dtype))
  v.m = chosen - rejected
  v.rewards = ratio:detach() * options.beta
  return v
end

-- Cross entropy of the chosen answers over their tokens in the whole batch.
local function nll(batch, logp, P)
  local tokens = batch.completion_cu:read()[P]
  return fn.sum(logp:narrow(1, 1, tokens)) * (-1 / math.max(batch.total_tokens or tokens, 1))
end

--- The share of these pairs in the loss of the whole batch: a mean over pairs, of sft over the
--- chosen tokens. The shares of micro-batches add up to the loss of the batch in one.
---@param batch table         completion_cu [2P+1] i32; ref_logps? [2P]; log_p2? [K], log sum p^2 of
---   each token (WPO); total_rows?, total_tokens?: pairs and chosen tokens of the whole batch
---   (default: this is it)
---@param logp liger.Tensor   [K] of the completion tokens under the policy
---@param options table       of options()
---@return liger.Tensor loss  []
---@return { logps: liger.Tensor, rewards: liger.Tensor } values  [2P] each, for the log
function M.loss(batch, logp, options)
  local v = values_of(batch, logp, options)
  local P = v.c:size(1)
  local total = batch.total_rows or P
  if options.is_sorted and P ~= total then
    lib.raise(
      ("dpo: aot sorts the whole batch, got %d of %d pairs; it cannot be split"):format(P, total)
    )
  end
  local weights = options.use_weighting and autograd.no_grad(pair_weights, batch, logp)
  local sum
  for _, loss in ipairs(options.losses) do
    local share
    if loss.name == "sft" then
      share = nll(batch, logp, P) * loss.weight
    else
      local pairs_loss = LOSS[loss.name](v, options)
      pairs_loss = weights and pairs_loss * weights or pairs_loss
      share = fn.sum(pairs_loss) * (loss.weight / total)
    end
    sum = sum and sum + share or share
  end
  return sum, { logps = v.logps:detach(), rewards = v.rewards }
end

return M
