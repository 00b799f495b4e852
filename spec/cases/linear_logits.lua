return {
  shapes = {
    { N = 0, C = 8, V = 5 }, -- nothing to do
    { N = 1, C = 1, V = 1 },
    { N = 7, C = 19, V = 37, temperature = 0.7 }, -- no size is a multiple of a vector
    { N = 5, C = 16, V = 33, softcap = 5 },
    { N = 40, C = 24, V = 1030, temperature = 1.3, softcap = 3 }, -- enough for two threads
  },
  device_shapes = {
    { N = 3, C = 40, V = 151936 }, -- vocabularies of real models
    { N = 5, C = 24, V = 128256, softcap = 5 },
  },
  bench = { { N = 32, C = 128, V = 256 }, { N = 32, C = 576, V = 49152 } },
  device_bench = { { N = 64, C = 4096, V = 128256 } },
  inputs = function(r, s)
    return {
      x = r.normal(s.N, s.C),
      w = r.normal(s.V, s.C),
      b = r.normal(s.V),
      temperature = s.temperature or 1,
      softcap = s.softcap or 0,
    }
  end,
  bytes = function(s, width)
    return (s.N * s.C + s.V * s.C) * width + 4 * s.N * s.V
  end,
  flops = function(s)
    return 2 * s.N * s.C * s.V
  end,
}
