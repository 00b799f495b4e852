return {
  shapes = {
    { N = 0, V = 5, C = 8 }, -- nothing to do
    { N = 1, V = 1, C = 1 },
    { N = 40, V = 9, C = 33 }, -- ids repeat; not a multiple of a vector
    -- an id whose row gets no gradient, which differences would show
    { N = 40, V = 9, C = 8, padding_idx = 3, grad = false },
    { N = 600, V = 50, C = 80, grad = false }, -- two threads, each with its columns
  },
  device_shapes = {
    { N = 70, V = 151936, C = 24 }, -- the vocabulary of a real model
  },
  bench = { { N = 2560, V = 256, C = 128 }, { N = 8192, V = 49152, C = 576 } },
  device_bench = { { N = 8192, V = 128256, C = 4096 } },
  inputs = function(r, s)
    return {
      w = r.normal(s.V, s.C), ids = r.integer(0, s.V - 1, s.N), padding_idx = s.padding_idx or -1,
    }
  end,
  bytes = function(s, width)
    return 2 * s.N * s.C * width
  end,
  bytes_backward = function(s, width)
    return s.N * s.C * (width + 8)
  end,
}
