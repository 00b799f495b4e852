return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 77 }, -- not a multiple of a vector
  },
  bench = { { N = 1048576 } },
  device_bench = { { N = 67108864 } },
  inputs = function(r, s)
    return { x = r.normal(s.N) }
  end,
  bytes = function(s, width)
    return 2 * s.N * width
  end,
  bytes_backward = function(s, width)
    return 3 * s.N * width
  end,
}
