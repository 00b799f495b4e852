return {
  shapes = {
    { N = 0, H = 2, D = 8, R = 4 }, -- nothing to do
    { N = 1, H = 1, D = 2, R = 1 },
    { N = 5, H = 3, D = 16, R = 8 },
    { N = 6, H = 2, D = 21, R = 4, offset = 1 }, -- part of an odd head turns; Gemma
    { N = 3, H = 2, D = 6, R = 0 }, -- nothing turns
    { N = 40, H = 3, D = 32, R = 8, grad = false }, -- dw sums two blocks of rows; vectors that pass
    { N = 3, H = 2, D = 1024, R = 512, grad = false }, -- the longest head
    { N = 900, H = 3, D = 128, R = 64, grad = false }, -- enough for two threads
  },
  bench = { { N = 2560, H = 8, D = 32, R = 16 }, { N = 4096, H = 16, D = 128, R = 64 } },
  device_bench = { { N = 8192, H = 32, D = 128, R = 64 } },
  inputs = function(r, s)
    return {
      x = r.normal(s.N, s.H, s.D),
      w = r.normal(s.D),
      cos = r.uniform(-1, 1, 50, s.R),
      sin = r.uniform(-1, 1, 50, s.R),
      position = r.integer(0, 49, s.N),
      eps = 1e-5,
      offset = s.offset or 0,
    }
  end,
  bytes = function(s, width)
    return 2 * s.N * s.H * s.D * width
  end,
  bytes_backward = function(s, width)
    return 3 * s.N * s.H * s.D * width
  end,
}
