local helper = require("spec.helper")
local advantage = require("liger.loss.advantage")

local NAN = 0 / 0

local function compute(rewards, options)
  options = options or {}
  options.group = options.group or #rewards
  return advantage.compute(rewards, options)
end

describe("advantages", function()
  it("are (reward - mean) / (standard deviation + 1e-4)", function()
    local advantages, metrics = compute({ 1, 0, 0, 1, 5, 5, 5, 9 }, { group = 4 })
    local half, two = math.sqrt(1 / 3) + 1e-4, 2 + 1e-4
    helper.close(advantages, {
      0.5 / half, -0.5 / half, -0.5 / half, 0.5 / half, -1 / two, -1 / two, -1 / two, 3 / two,
    }, 1e-12)
    helper.close(metrics.reward, 26 / 8, 1e-12)
    -- The deviation of the whole batch is reported, whatever divides.
    helper.close(metrics.reward_std, math.sqrt(73.5 / 7), 1e-12)
    assert.equal(0, metrics.frac_reward_zero_std)
  end)

  it("B32: are exactly 0 in a group of equal rewards, however their mean rounds", function()
    for _, rewards in ipairs({
      { 1, 1, 1, 1 }, { 0.1, 0.1, 0.1 }, { -0.7, -0.7, -0.7, -0.7, -0.7, -0.7, -0.7 },
    }) do
      for _, options in ipairs({ {}, { scale_rewards = "none" }, { scale_rewards = "batch" } }) do
        local advantages, metrics = compute(rewards, options)
        for i = 1, #rewards do
          assert.equal(0, advantages[i])
        end
        assert.equal(0, metrics.reward_std)
        assert.equal(1, metrics.frac_reward_zero_std)
        assert.equal(rewards[1], metrics.reward)
      end
    end
    local advantages, metrics = compute({ 0.1, 0.1, 0.1, 0, 1, 1 }, { group = 3 })
    assert.same({ 0, 0, 0 }, { unpack(advantages, 1, 3) })
    assert.is_true(advantages[4] < -1 and advantages[5] > 0.5)
    assert.equal(0.5, metrics.frac_reward_zero_std)
  end)

  it("are 0 in a group of one", function()
    assert.same({ 0, 0, 0 }, (compute({ 1, 2, 3 }, { group = 1 })))
  end)

  it("can be scaled by the batch or not at all", function()
    local rewards = { 0, 1, 4, 8 }
    local unscaled = compute(rewards, { group = 2, scale_rewards = "none" })
    helper.close(unscaled, { -0.5, 0.5, -2, 2 }, 1e-12)
    local std = math.sqrt(((0 - 3.25) ^ 2 + (1 - 3.25) ^ 2 + (4 - 3.25) ^ 2 + (8 - 3.25) ^ 2) / 3)
    local advantages, metrics = compute(rewards, { group = 2, scale_rewards = "batch" })
    local divisor = std + 1e-4
    helper.close(advantages, {
      -0.5 / divisor, 0.5 / divisor, -2 / divisor, 2 / divisor,
    }, 1e-12)
    helper.close(metrics.reward_std, std, 1e-12)
  end)

  it("leave functions that do not apply out, and give 0 where none does", function()
    local rewards = { { 1, NAN }, { NAN, 3 }, { NAN, NAN } }
    local advantages, metrics = compute(rewards, { scale_rewards = "none" })
    helper.close(advantages, { -1, 1, 0 }, 1e-12)
    helper.close(metrics.reward, 2, 1e-12)
    advantages, metrics = compute({ { NAN }, { NAN } })
    assert.same({ 0, 0 }, advantages)
    assert.same({ reward = 0, reward_std = 0, frac_reward_zero_std = 0 }, metrics)
  end)

  it("come with mean and deviation of each named function, where it applies", function()
    local _, metrics = compute({ { 1, NAN, NAN }, { 3, 3, NAN } }, { names = { "a", "b", "c" } })
    assert.equal(2, metrics["rewards/a/mean"])
    helper.close(metrics["rewards/a/std"], math.sqrt(2), 1e-12)
    assert.equal(3, metrics["rewards/b/mean"])
    assert.equal(0, metrics["rewards/b/std"])
    assert.is_nil(metrics["rewards/c/mean"])
  end)

  it("of nothing are nothing", function()
    for _, options in ipairs({
      {}, { scale_rewards = "batch" }, { multi_objective_aggregation = "normalize_then_sum" },
    }) do
      options.group = 4
      local advantages, metrics = advantage.compute({}, options)
      assert.same({}, advantages)
      assert.equal(0, metrics.reward)
      assert.equal(metrics.reward_std, metrics.reward_std)
    end
  end)

  it("refuse what does not fit", function()
    local function refused(rewards, options, ...)
      helper.raises(function()
        advantage.compute(rewards, options)
      end, ...)
    end
    refused({ 1, 2, 3 }, { group = 2 }, "advantage: 3 rewards, wanted a multiple of the group of 2")
    refused({ 1 }, {}, "advantage: group is nil, wanted a whole number from 1")
    refused({ 1 }, { group = 0 }, "advantage: group is 0")
    refused({ 1 }, { group = 1.5 }, "advantage: group is 1.5")
    refused({ 1 }, {
      group = 1, scale_rewards = "sum",
    }, "advantage: scale_rewards is sum, wanted group, batch or none")
    refused({ 1 }, { group = 1, scale_rewards = false }, "advantage: scale_rewards is false")
    refused({ 1 }, {
      group = 1, multi_objective_aggregation = "sum",
    }, "advantage: multi_objective_aggregation is sum, wanted sum_then_normalize or normalize_")
    refused({ 1 }, { group = 1, scale = "none" }, "advantage: unknown option scale")
    refused({ { 1, 2 } }, {
      group = 1, reward_weights = { 1 },
    }, "advantage: 1 reward_weights, wanted one for each of 2")
  end)
end)
