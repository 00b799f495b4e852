return {
  shapes = {
    { N = 0 }, -- the sum of nothing is 0
    { N = 77 },
    { N = 4099 }, -- a second block
    { N = 131075, grad = false }, -- enough for two threads, and a tail
  },
  bench = { { N = 1048576 } },
  device_bench = { { N = 67108864 } },
  inputs = function(r, s)
    return { x = r.normal(s.N) }
  end,
  bytes = function(s, width)
    return s.N * width
  end,
}
