-- In bf16 the result is one of the two neighbours of the fp32 one: within a step of bf16.
return {
  shapes = {
    { N = 0, step = 1 }, -- nothing to do
    { N = 1, step = 1 }, -- the first step: the bias corrections are largest
    { N = 77, step = 7 }, -- not a multiple of a vector
    { N = 32771, step = 1000 }, -- enough for two threads, and a tail
  },
  bench = { { N = 1048576, step = 10 } },
  device_bench = { { N = 67108864, step = 10 } },
  inputs = function(r, s)
    return {
      g = r.normal(s.N), -- f32 also for bf16 parameters
      grad_scale = 0.5,
      lr = 1e-2,
      beta1 = 0.9,
      beta2 = 0.999,
      eps = 1e-8,
      weight_decay = 0.1,
      step = s.step,
      seed = 1234567890123,
      stream = 7,
      p = r.normal(s.N),
      m = r.normal(s.N),
      v = r.uniform(0.1, 2, s.N),
    }
  end,
  bytes = function(s, width)
    return s.N * (6 * width + 4)
  end,
}
