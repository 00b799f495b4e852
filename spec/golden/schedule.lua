local optim = require("liger.optim")

local function run(case)
  local o = case.options
  local rate = optim.schedule(o.schedule, {
    lr = o.lr, steps = o.total_steps, warmup = o.warmup_steps, lr_end = o.lr_end, power = o.power,
    min_lr_ratio = o.min_lr and o.min_lr / o.lr or o.min_lr_ratio, decay_steps = o.decay_steps,
    decay_type = o.decay_type, stable_steps = o.stable_steps,
  })
  local lr = {}
  for t = 1, o.steps do
    lr[t] = rate(t - 1)
  end
  return { ["out.lr"] = lr }
end

return { compared = 9, run = run, only_f64 = true }
