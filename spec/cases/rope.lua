return {
  shapes = {
    { N = 0, H = 2, D = 8, R = 4 }, -- nothing to do
    { N = 1, H = 1, D = 2, R = 1 },
    { N = 5, H = 3, D = 16, R = 8 },
    { N = 6, H = 2, D = 20, R = 4 }, -- only part of a head turns
    { N = 4, H = 2, D = 6, R = 0 }, -- nothing turns
    { N = 5, H = 3, D = 16, R = 8, interleaved = true },
    { N = 6, H = 5, D = 19, R = 5, interleaved = true }, -- an odd head, part of it turns
    { N = 40, H = 6, D = 64, R = 16, interleaved = true, grad = false }, -- vectors that pass
    { N = 200, H = 3, D = 64, R = 32, grad = false }, -- enough for two threads
  },
  bench = { { N = 2560, H = 4, D = 32, R = 16 }, { N = 8192, H = 9, D = 64, R = 32 } },
  device_bench = {
    { N = 8192, H = 32, D = 128, R = 64 },
    { N = 8192, H = 32, D = 128, R = 64, interleaved = true },
  },
  inputs = function(r, s)
    return {
      x = r.normal(s.N, s.H, s.D),
      cos = r.uniform(-1, 1, 50, s.R),
      sin = r.uniform(-1, 1, 50, s.R),
      position = r.integer(0, 49, s.N),
      interleaved = s.interleaved or false,
    }
  end,
  bytes = function(s, width)
    return 2 * s.N * s.H * s.D * width
  end,
  bytes_backward = function(s, width)
    return 2 * s.N * s.H * s.D * width
  end,
}
