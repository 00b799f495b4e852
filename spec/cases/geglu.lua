return {
  shapes = {
    { N = 0, C = 8, approximate = false }, -- nothing to do
    { N = 1, C = 1, approximate = true },
    { N = 3, C = 35, approximate = false }, -- not a multiple of a vector
    { N = 3, C = 35, approximate = true },
    { N = 3, C = 35, scale = 8, approximate = true, grad = false }, -- both tails
    { N = 3, C = 35, scale = 8, approximate = false, grad = false },
    { N = 70, C = 600, approximate = true, grad = false }, -- a block and more; two threads
  },
  bench = {
    { N = 2560, C = 384, approximate = true }, { N = 2560, C = 384, approximate = false },
  },
  device_bench = {
    { N = 8192, C = 14336, approximate = true }, { N = 8192, C = 14336, approximate = false },
  },
  inputs = function(r, s)
    return {
      gate = r.normal(s.N, s.C) * (s.scale or 1), up = r.normal(s.N, s.C),
      approximate = s.approximate,
    }
  end,
  bytes = function(s, width)
    return 3 * s.N * s.C * width
  end,
  bytes_backward = function(s, width)
    return 5 * s.N * s.C * width
  end,
}
