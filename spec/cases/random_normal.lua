return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 1 }, -- half a pair
    { N = 1025 }, -- one more than a thread's piece, which ends in half a pair
  },
  bench = { { N = 1048576 } },
  device_bench = { { N = 67108864 } },
  inputs = function(r, s)
    return { seed = 1234567890123, stream = 5, mean = 0.5, std = 2, y = r.normal(s.N) }
  end,
  bytes = function(s, width)
    return s.N * width
  end,
}
