return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 77 }, -- not a multiple of a vector
    { N = 262147, grad = false }, -- enough for two threads, and a tail
  },
  bench = { { N = 1048576 }, { N = 16777216 } },
  device_bench = { { N = 67108864 } },
  inputs = function(r, s)
    return { x = r.normal(s.N), y = r.normal(s.N) }
  end,
  bytes = function(s, width)
    return 2 * s.N * width
  end,
}
