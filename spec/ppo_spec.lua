local helper = require("spec.helper")
local fn = require("liger.fn")
local ppo = require("liger.loss.ppo")
local Tensor = require("liger.tensor")

local function vector(...)
  return Tensor.from_table({ ... }, "f64")
end

describe("PPO", function()
  it("B41: clips where the ratio leaves its range in the advantage's direction", function()
    -- Ratios 0.7, 0.7, 1.3, 1.3.
    local old, logp = vector(-1, -1, -1, -1), {}
    for i, ratio in ipairs({ 0.7, 0.7, 1.3, 1.3 }) do
      logp[i] = -1 + math.log(ratio)
    end
    logp = vector(unpack(logp)):requires_grad_()
    local batch = { old_logp = old, advantage = vector(1, -1, 1, -1) }
    local loss, metrics = ppo.loss(batch, logp, fn.zeros(4, "f64"), nil, ppo.options())
    helper.close(loss:item(), (-0.7 + 0.8 - 1.2 + 1.3) / 4, 1e-12)
    assert.equal(0.5, metrics.policy_clip_fraction:item())
    assert.is_nil(metrics.value_loss)
    loss:backward()
    helper.close(logp.grad, { -0.7 / 4, 0, 0, 1.3 / 4 }, 1e-12)
  end)

  it("takes the larger of the value's two errors, and mean entropy off the loss", function()
    local batch = {
      old_logp = vector(-1, -1), advantage = vector(0, 0), old_value = vector(1, 1),
      returns = vector(2, 1.1),
    }
    -- Held at 1.2 and 1.1: errors 0.64 and 0; free: 0.25 and 0.16.
    local loss, metrics = ppo.loss(batch, vector(-1, -1), vector(0.5, 0.3), vector(1.5, 1.5),
      ppo.options({ vf_coef = 0.5, entropy_coef = 0.1 }))
    local value_loss = (0.64 + 0.16) / 4
    helper.close(metrics.value_loss:item(), value_loss, 1e-12)
    assert.equal(0.5, metrics.value_clip_fraction:item())
    helper.close(loss:item(), 0.5 * value_loss - 0.1 * 0.4, 1e-12)
  end)

  it("has the gradient of central differences, through the value head too", function()
    local n = 6
    local old = helper.normal(1, { n }, "f64") * 0.1
    local batch = {
      old_logp = old, advantage = helper.normal(2, { n }, "f64"),
      old_value = helper.normal(3, { n }, "f64"), returns = helper.normal(4, { n }, "f64"),
    }
    helper.gradients(function(logp, entropy, hidden, weight, bias)
      return (ppo.loss(batch, logp, entropy, ppo.value(hidden, weight, bias), ppo.options({
        entropy_coef = 0.2, vf_coef = 0.7,
      })))
    end, {
      helper.normal(5, { n }, "f64") * 0.1, helper.normal(6, { n }, "f64"),
      helper.normal(7, { n, 3 }, "f64"), helper.normal(8, { 3 }, "f64"), vector(0.2),
    })
  end)

  it("B20: has the same loss in micro-batches", function()
    local function at(first, last)
      local function part(stream)
        return helper.normal(stream, { 5 }, "f64"):narrow(1, first, last - first + 1)
      end
      local batch = {
        old_logp = part(1), advantage = part(2), old_value = part(3), returns = part(4),
        total_tokens = 5,
      }
      return ppo.loss(batch, part(5), part(6), part(7), ppo.options()):item()
    end
    helper.close(at(1, 2) + at(3, 5), at(1, 5), 1e-12)
  end)

  it("estimates advantages by their recursion", function()
    local rewards, values, gamma, lambda = { 0, 1, -0.5 }, { 0.2, 0.4, -0.1 }, 0.9, 0.8
    local delta = { 0 + 0.9 * 0.4 - 0.2, 1 + 0.9 * -0.1 - 0.4, -0.5 + 0.1 }
    local advantages, returns = ppo.gae(rewards, values, gamma, lambda)
    local k = gamma * lambda
    helper.close(advantages, { delta[1] + k * delta[2] + k * k * delta[3],
      delta[2] + k * delta[3], delta[3] }, 1e-12)
    for t = 1, 3 do
      helper.close(returns[t], advantages[t] + values[t], 1e-12)
    end
    -- lambda 1, gamma 1: the reward to come less the value.
    helper.close((ppo.gae(rewards, values, 1, 1)), { 0.3, 0.1, -0.4 }, 1e-12)
    assert.same({}, (ppo.gae({}, {}, 1, 1)))
    helper.raises(function()
      ppo.gae({ 1 }, {}, 1, 1)
    end, "gae: 0 values, wanted one for each of 1 rewards")
  end)

  it("refuses options out of range", function()
    for text, o in pairs({
      ["ppo: unknown option epsilon"] = { epsilon = 1 },
      ["ppo: cliprange is -1, wanted a number from 0"] = { cliprange = -1 },
      ["ppo: cliprange_value is -1, wanted a number from 0"] = { cliprange_value = -1 },
      ["ppo: vf_coef is -1, wanted a number from 0"] = { vf_coef = -1 },
      ["ppo: entropy_coef is -1, wanted a number from 0"] = { entropy_coef = -1 },
    }) do
      helper.raises(function()
        ppo.options(o)
      end, text)
    end
  end)
end)
