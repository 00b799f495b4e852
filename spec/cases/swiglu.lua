return {
  shapes = {
    { N = 0, C = 8 }, -- nothing to do
    { N = 1, C = 1 },
    { N = 3, C = 35 }, -- not a multiple of a vector
    { N = 3, C = 24, gate_multiplier = 0.88, down_multiplier = 0.31 }, -- Falcon H1
    { N = 70, C = 600, grad = false }, -- more than a block; enough for two threads
  },
  bench = { { N = 2560, C = 384 }, { N = 4096, C = 1536 } },
  device_bench = { { N = 8192, C = 14336 }, { N = 16384, C = 6144 } },
  inputs = function(r, s)
    return {
      gate = r.normal(s.N, s.C), up = r.normal(s.N, s.C), gate_multiplier = s.gate_multiplier or 1,
      down_multiplier = s.down_multiplier or 1,
    }
  end,
  bytes = function(s, width)
    return 3 * s.N * s.C * width
  end,
  bytes_backward = function(s, width)
    return 5 * s.N * s.C * width
  end,
}
