-- The public surface: re-exports, nothing else. Modules are loaded when they are first named, so
-- that a small script starts at once.
local MODULES = {
  autograd = "liger.autograd",
  fn = "liger.fn",
  memory = "liger.memory",
  ops = "liger.ops",
  optim = "liger.optim",
  pack = "liger.nn.pack",
  ranks = "liger.ranks",
  sampler = "liger.data.sampler",
  teacher = "liger.data.teacher",
  tokenizer = "liger.data.tokenizer",
  jsonl = "liger.data.jsonl",
  task = "liger.train.task",
  cpo = "liger.loss.cpo",
  dpo = "liger.loss.dpo",
  distill = "liger.loss.distill",
  grpo = "liger.loss.grpo",
  kto = "liger.loss.kto",
  loss = "liger.loss",
  orpo = "liger.loss.orpo",
  ppo = "liger.loss.ppo",
  preference = "liger.train.preference",
  ranges = "liger.train.ranges",
  sft = "liger.loss.sft",
  score = "liger.rollout.score",
}

-- name = { module, function }
local FUNCTIONS = {
  advantage = { "liger.loss.advantage", "compute" },
  checkpoint = { "liger.autograd", "checkpoint" },
  config = { "liger.train.config", "new" },
  empty = { "liger.tensor", "empty" },
  evaluate = { "liger.train.evaluate", "supervised" },
  graph = { "liger.graph", "new" },
  fill = { "liger.train.config", "fill" },
  from_config = { "liger.model", "from_config" },
  full = { "liger.fn", "full" },
  generate = { "liger.rollout", "generate" },
  load = { "liger.model", "load" },
  manual_seed = { "liger.fn", "manual_seed" },
  merge = { "liger.train.config", "merge" },
  mismatch = { "liger.data.preference", "mismatch" },
  no_grad = { "liger.autograd", "no_grad" },
  ones = { "liger.fn", "ones" },
  optimizer = { "liger.train.optimizer", "new" },
  pick = { "liger.train.config", "pick" },
  rand = { "liger.fn", "rand" },
  randn = { "liger.fn", "randn" },
  reward = { "liger.rollout.reward", "new" },
  rollouts = { "liger.train.rollouts", "new" },
  rollout = { "liger.rollout.batch", "generate" },
  run = { "liger.train.run", "new" },
  save = { "liger.model", "save" },
  scope = { "liger.memory", "scope" },
  set_threads = { "liger.ffi", "set_threads" },
  tensor = { "liger.tensor", "from_table" },
  unpair = { "liger.data.preference", "unpair" },
  zeros = { "liger.fn", "zeros" },
}

local names = {} -- for the prompt's completion
for _, list in ipairs({ MODULES, FUNCTIONS }) do
  for name in pairs(list) do
    names[#names + 1] = name
  end
end

return setmetatable({}, {
  __names = names,
  __index = function(liger, name)
    local value
    if MODULES[name] then
      value = require(MODULES[name])
    elseif FUNCTIONS[name] then
      -- The tensor's methods come with fn and autograd.
      require("liger.fn")
      value = require(FUNCTIONS[name][1])[FUNCTIONS[name][2]]
    end
    rawset(liger, name, value)
    return value
  end,
})
