-- Losses on logits that are there: [N,V], or any leading dimensions. From hidden states and a head,
-- fn.linear_logprob and fn.linear_cross_entropy never hold them in full.
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")
local with_defaults = require("liger.options").plain

local M = {}

local LOGPROB_DEFAULTS = { temperature = 1, ignore = -100 }
local ENTROPY_DEFAULTS = { temperature = 1 }
local CROSS_ENTROPY_DEFAULTS = {
  reduction = "mean", -- mean, sum or none
  class_weight = false, -- [V], or none
  label_smoothing = 0,
  z_loss = 0, -- times lse^2
  softcap = 0, -- 0: none
  ignore = -100, -- targets that take no part
}
local REDUCTIONS = { mean = true, sum = true, none = true }

-- The first n sizes of x, then one more.
local function extended(x, n, more)
  local shape = { unpack(x.shape, 1, n) }
  shape[n + 1] = more
  return shape
end

--- Log-probability of each target under softmax(logits / temperature), with the row's entropy: one
--- read of the row. A row whose gradient is exactly 0 is not read again.
---@param logits liger.Tensor  [*,V]
---@param target liger.Tensor  [*] i32, or [*,K] for K tokens a row; -100: none
---@param options? table       temperature, ignore
---@return liger.Tensor logp    of target's shape, nats; 0 where there is no target
---@return liger.Tensor entropy [*], nats; 0 in rows without any target
---@return liger.Tensor lse     [*]; takes no gradient
function M.logprob(logits, target, options)
  local o = with_defaults("logprob", LOGPROB_DEFAULTS, options)
  local single = #target.shape == #logits.shape - 1
  local logp, entropy, lse = ops.logprob(
    logits, single and target:reshape(unpack(extended(target, #target.shape, 1))) or target,
    o.temperature, o.ignore
  )
  return single and logp:reshape(unpack(target.shape)) or logp, entropy, lse
end

--- Entropy of softmax(logits / temperature).
---@param logits liger.Tensor  [*,V]
---@param options? table       temperature
---@return liger.Tensor        [*], nats
function M.entropy(logits, options)
  local o = with_defaults("entropy", ENTROPY_DEFAULTS, options)
  local none = Tensor.empty(extended(logits, #logits.shape - 1, 0), "i32")
  local _, entropy = ops.logprob(logits, none, o.temperature, 0)
  return entropy
end

--- Raises unless z_loss is a number from 0.
---@param op string
---@param z_loss any
function M.check_z_loss(op, z_loss)
  if type(z_loss) ~= "number" or z_loss ~= z_loss or z_loss < 0 then
    lib.raise(("%s: z_loss is %s, wanted a number from 0"):format(op, tostring(z_loss)))
  end
end

local function converted(x, dtype)
  local y = Tensor.empty(x.shape, dtype)
  ops.copy(x, y)
  return y
end

local function filled(like, value)
  return Tensor.empty(like.shape, like.dtype):fill_(value)
end

-- total / count, 0 of nothing; both [].
local function mean_of(total, count)
  return ops.div(total, ops.add(count, ops.equal(count, filled(count, 0))))
end

--- Cross entropy of softmax(logits). Its mean divides by the kept rows' class weights (their number
--- without weights), that of the z-loss by the number of kept rows; a mean over nothing is 0. What
--- divides is counted on the device.
---@param logits liger.Tensor  [*,V]
---@param target liger.Tensor  [*] i32; -100: no target
---@param options? table       reduction, class_weight, label_smoothing, z_loss, softcap, ignore
---@return liger.Tensor loss   [], or [*] with reduction none; the z-loss is in it
---@return { loss: liger.Tensor, z_loss?: liger.Tensor, lse: liger.Tensor,
---   predicted: liger.Tensor, accuracy: liger.Tensor } rows  [*] each, without gradient; accuracy
---   [] is the share of the kept rows whose largest logit is the target's (of equals the first)
function M.cross_entropy(logits, target, options)
  local o = with_defaults("cross_entropy", CROSS_ENTROPY_DEFAULTS, options)
  if not REDUCTIONS[o.reduction] then
    lib.raise(
      ("cross_entropy: reduction is %s, wanted mean, sum or none"):format(tostring(o.reduction))
    )
  end
  M.check_z_loss("cross_entropy", o.z_loss)
  local loss, lse, weight, predicted = ops.cross_entropy(
    logits, target, o.class_weight, o.label_smoothing, o.softcap, o.ignore
  )
  local z_loss = o.z_loss ~= 0 and ops.affine(ops.mul(lse, lse), o.z_loss, 0) or nil
  local all = z_loss and ops.add(loss, z_loss) or loss
  local id = converted(predicted, loss.dtype)
  local kept = ops.less_equal(filled(id, 0), id)
  local count, hit = ops.sum(kept), ops.equal(id, converted(target, loss.dtype))
  local rows = {
    loss = all:detach(), z_loss = z_loss and z_loss:detach(), lse = lse:detach(),
    predicted = predicted, accuracy = mean_of(ops.sum(ops.mul(hit, kept)), count),
  }
  if o.reduction == "mean" then
    local mean = mean_of(ops.sum(loss), ops.sum(weight))
    return z_loss and ops.add(mean, mean_of(ops.sum(z_loss), count)) or mean, rows
  end
  return o.reduction == "none" and all or ops.sum(all), rows
end

return M
