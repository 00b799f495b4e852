return {
  shapes = {
    {}, -- a scalar, as losses are
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 77 }, -- not a multiple of a vector
  },
  bench = { { N = 1048576 } },
  device_bench = { { N = 67108864 } },
  inputs = function(r, s)
    return { x = s.N and r.normal(s.N) or r.normal(), scale = -1.5, shift = 0.25 }
  end,
  bytes = function(s, width)
    return 2 * s.N * width
  end,
  bytes_backward = function(s, width)
    return 2 * s.N * width
  end,
}
