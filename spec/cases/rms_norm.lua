return {
  shapes = {
    { N = 0, H = 2, C = 8 }, -- nothing to do
    { N = 1, H = 1, C = 2 },
    { N = 5, H = 3, C = 33 }, -- heads of a fused matrix; not a multiple of a vector
    { N = 5, H = 3, C = 33, offset = 1, round = false }, -- Gemma
    { N = 3, H = 1, C = 40, offset = -0.5, round = true },
    { N = 70, H = 1, C = 48 }, -- dw sums two blocks of rows
    { N = 3, H = 1, C = 1100, grad = false }, -- more than a block of a sum
    -- longer than a device holds
    { N = 2, H = 1, C = 17000, offset = 1, round = false, grad = false },
    { N = 700, H = 3, C = 64, grad = false }, -- enough for two threads
  },
  bench = {
    { N = 2560, H = 1, C = 128 },
    { N = 1024, H = 9, C = 64 },
    { N = 4096, H = 1, C = 2048 },
  },
  device_bench = {
    { N = 8192, H = 1, C = 4096 },
    { N = 8192, H = 1, C = 4096, offset = 1, round = false },
    { N = 32768, H = 1, C = 2048 },
    { N = 8192, H = 32, C = 128 },
  },
  inputs = function(r, s)
    return {
      x = r.normal(s.N, s.H, s.C), w = r.normal(s.C), eps = 1e-5, offset = s.offset or 0,
      round = s.round ~= false,
    }
  end,
  bytes = function(s, width)
    return 2 * s.N * s.H * s.C * width
  end,
  bytes_backward = function(s, width)
    return 3 * s.N * s.H * s.C * width
  end,
}
