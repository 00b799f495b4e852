return {
  shapes = {
    { N = 0, V = 5 }, -- nothing to do
    { N = 1, V = 1 }, -- the one probability is 1
    { N = 7, V = 37 }, -- no multiple of a vector
    { N = 40, V = 1030, grad = false }, -- enough for two threads
    { N = 3, V = 33333, grad = false }, -- more than a block holds
  },
  device_shapes = { { N = 3, V = 128256 } }, -- read twice
  bench = { { N = 2560, V = 256 }, { N = 256, V = 32768 } },
  device_bench = { { N = 8192, V = 32768 }, { N = 8192, V = 128256 } },
  inputs = function(r, s)
    return { x = r.normal(s.N, s.V) }
  end,
  bytes = function(s, width)
    return 2 * s.N * s.V * width
  end,
  bytes_backward = function(s, width)
    return 3 * s.N * s.V * width
  end,
}
