return {
  shapes = {
    {}, -- a scalar, as losses are
    { N = 0 }, -- the sum of nothing is 0
    { N = 1 },
    { N = 77 },
    { N = 4099 }, -- a second block
    { N = 131075, grad = false }, -- enough for two threads, and a tail
  },
  bench = { { N = 1048576 } },
  device_bench = { { N = 67108864 } },
  inputs = function(r, s)
    return { x = s.N and r.normal(s.N) or r.normal() }
  end,
  bytes = function(s, width)
    return s.N * width
  end,
}
