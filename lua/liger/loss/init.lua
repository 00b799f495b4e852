-- The losses by name: those on a linear layer, which need nothing else, and the methods' modules,
-- loaded when they are first named.
local fn = require("liger.fn")

local METHODS = {
  advantage = true, cpo = true, distill = true, dpo = true, grpo = true, kto = true, orpo = true,
  ppo = true, sft = true,
}

return setmetatable({
  linear_cross_entropy = fn.linear_cross_entropy,
  linear_distill = fn.linear_distill,
  linear_distill_topk = fn.linear_distill_topk,
  linear_logprob = fn.linear_logprob,
}, {
  __index = function(losses, name)
    if METHODS[name] then
      losses[name] = require("liger.loss." .. name)
    end
    return rawget(losses, name)
  end,
})
