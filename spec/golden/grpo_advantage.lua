local function run(case)
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

return { compared = 4, run = run, only_f64 = true }
