local golden = require("spec.golden")
local optim = require("liger.optim")

local function run(case)
  local o = case.options
  local p = golden.leaf(case, "param")
  local optimizer = optim.adamw({ { name = "proj.weight", tensor = p } }, {
    beta1 = o.betas[1], beta2 = o.betas[2], eps = o.eps, weight_decay = o.weight_decay,
    max_grad_norm = o.max_norm or 0,
  })
  local result = {}
  for step, lr in ipairs(o.lr) do
    p.grad = case.get("in.grad" .. step)
    result["out.norm" .. step] = optimizer:step(lr)
    result["out.param" .. step] = p:clone():detach()
  end
  result["out.exp_avg"], result["out.exp_avg_sq"] = optimizer.states[1].m, optimizer.states[1].v
  return result
end

return { compared = 3, run = run }
