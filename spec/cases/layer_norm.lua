return {
  shapes = {
    { N = 0, H = 2, C = 8 }, -- nothing to do
    { N = 1, H = 1, C = 2 },
    { N = 5, H = 3, C = 33 }, -- strided rows; not a multiple of a vector
    { N = 6, H = 1, C = 40, mean = 200, grad = false }, -- the mean is far above the spread
    { N = 70, H = 1, C = 48 }, -- dw and db sum two blocks of rows
    { N = 3, H = 1, C = 2100, grad = false }, -- several vectors a thread
    { N = 3, H = 1, C = 17000, grad = false }, -- longer than a device holds
    { N = 700, H = 3, C = 64, grad = false }, -- enough for two threads
  },
  bench = { { N = 2560, H = 1, C = 128 }, { N = 4096, H = 1, C = 1024 } },
  device_bench = { { N = 8192, H = 1, C = 4096 }, { N = 32768, H = 1, C = 2048 } },
  inputs = function(r, s)
    local x = r.normal(s.N, s.H, s.C)
    return { x = s.mean and x + s.mean or x, w = r.normal(s.C), b = r.normal(s.C), eps = 1e-5 }
  end,
  bytes = function(s, width)
    return 2 * s.N * s.H * s.C * width
  end,
  bytes_backward = function(s, width)
    return 3 * s.N * s.H * s.C * width
  end,
}
