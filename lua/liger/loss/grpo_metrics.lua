-- GRPO's metrics by TRL's names, from sums over sequences that stay on the device until the step
-- ends: one read gives them all.
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local ranks = require("liger.ranks")
local Tensor = require("liger.tensor")

local M = {}

-- Sums over sequences that the metrics are made of, in the order of a part's rows.
local ROWS = { "policy", "entropy", "active", "kl", "low", "high", "phi" }

--- The sums of a micro-batch: a row each of those that there are.
---@param batch table
---@param weighted liger.Tensor  [K] losses times weights
---@param entropy liger.Tensor   [K]
---@param parts table            of token_loss()
---@param o table
---@return liger.Tensor sums  [R,S]
---@return string[] rows      their names
function M.sums(batch, weighted, entropy, parts, o)
  local A, ratio, kind = batch.advantage, parts.ratio, o.loss_type
  local x = { policy = weighted, entropy = entropy, kl = parts.kl, phi = parts.phi }
  if o.clips then
    x.low = fn.lt(ratio, 1 - o.epsilon) * fn.lt(A, 0)
    x.high = fn.gt(ratio, 1 + o.epsilon_high) * fn.gt(A, 0)
  elseif kind == "cispo" then
    x.high = fn.gt(ratio, o.epsilon_high) * fn.gt(A, 0)
  end
  x.active = parts.active and fn.where(parts.active, entropy, 0)
  local rows = {}
  for _, name in ipairs(ROWS) do
    rows[#rows + 1] = x[name] and name
  end
  local sums = Tensor.empty({ #rows, batch.completion_cu:numel() - 1 }, entropy.dtype)
  for i, name in ipairs(rows) do
    ops.raw.segment_sum(fn.where(batch.mask, x[name], 0), batch.completion_cu, sums:row(i))
  end
  return sums, rows
end

-- A loss of one's own that is not finite where the log-probabilities are.
local function check_own(x, s, part, o)
  if o.own and x.policy - x.policy ~= 0 and x.entropy - x.entropy == 0 then
    local text = part.samples and part.samples[s] and part.samples[s].text or ""
    lib.raise(
      ("loss: %s gave %s for completion %d, wanted finite numbers; the completion is %q"):format(
        o.loss, x.policy ~= x.policy and "nan" or "inf", s, text
      )
    )
  end
end

-- Adds the rows of sequence s, which has n > 0 tokens that count.
local function add_sequence(total, x, n, is_sequence)
  total.tokens, total.sequences = total.tokens + n, total.sequences + 1
  for name, value in pairs(x) do
    -- A ratio of the sequence counts once, whatever its length; so does phi.
    local once = name == "phi" or is_sequence and (name == "low" or name == "high")
    total[name] = (total[name] or 0) + (once and value / n or value)
  end
  total.low_min = math.min(total.low_min, (x.low or 0) / n)
  total.high_max = math.max(total.high_max, (x.high or 0) / n)
end

-- The totals of all processes.
local function join(total)
  local y = ranks.sum(total)
  for r, part in ipairs(ranks.gather({ low = total.low_min, high = total.high_max })) do
    y.low_min = r == 1 and part.low or math.min(y.low_min, part.low)
    y.high_max = r == 1 and part.high or math.max(y.high_max, part.high)
  end
  return y
end

--- TRL's metrics from what loss() gave for each micro-batch. Waits for the device once. Clipping is
--- counted where it binds: low where r < 1 - epsilon and A < 0, high where r > 1 + epsilon_high
--- and A > 0; low_min and high_max are over sequences.
---@param parts table[]  of one batch, this process's; none: no token had a gradient
---@param o table        of options()
---@return table<string, number>  loss alone where no token counts
function M.metrics(parts, o)
  local total = { all = 0, loss = 0, tokens = 0, sequences = 0, low_min = math.huge, high_max = 0 }
  local sums, at = {}, 0
  for i, part in ipairs(parts) do
    sums[i] = part.sums
  end
  local data = #parts > 0 and Tensor.read_all(sums)
  local is_sequence = o.importance_sampling_level == "sequence"
  for _, part in ipairs(parts) do
    local S = #part.tokens
    for s, n in ipairs(part.tokens) do
      local x = {}
      for i, name in ipairs(part.rows) do
        x[name] = tonumber(data[at + (i - 1) * S + s - 1])
      end
      total.all = total.all + 1
      check_own(x, s, part, o)
      total.loss = total.loss + x.policy - part.bonus * (x.active or x.entropy)
      if n > 0 then
        add_sequence(total, x, n, is_sequence)
      end
    end
    at = at + #part.rows * S
  end
  total = join(total)
  local m, tokens = { loss = total.loss }, total.tokens
  if tokens == 0 then
    return m
  end
  local clips = is_sequence and total.all or tokens
  m.entropy, m.kl = total.entropy / tokens, total.kl and total.kl / tokens
  if o.entropy_coef > 0 then
    m.policy_loss, m.entropy_coef = total.policy, o.entropy_coef
  end
  if total.phi then
    m["vespo/phi_seq_mean"] = total.phi / total.sequences
  elseif o.loss_type == "cispo" then
    m.cispo_clip_ratio = total.high / clips
  elseif total.low then
    m["clip_ratio/low_mean"], m["clip_ratio/low_min"] = total.low / clips, total.low_min
    m["clip_ratio/high_mean"], m["clip_ratio/high_max"] = total.high / clips, total.high_max
    m["clip_ratio/region_mean"] = (total.low + total.high) / clips
  end
  return m
end

return M
