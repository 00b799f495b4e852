return {
  shapes = {
    { N = 0, C = 8, O = 5 }, -- nothing to do
    { N = 1, C = 1, O = 1 },
    { N = 5, C = 19, O = 7 }, -- no size is a multiple of a vector
    { N = 150, C = 33, O = 70 }, -- many rows for the product; db sums three blocks of rows
    { N = 300, C = 130, O = 140, grad = false }, -- enough for two threads
  },
  bench = {
    { N = 2560, C = 128, O = 384 },
    { N = 32, C = 576, O = 1536 },
    { N = 2048, C = 576, O = 1536 },
  },
  device_bench = {
    { N = 8192, C = 4096, O = 4096 },
    { N = 8192, C = 4096, O = 14336 },
    { N = 4096, C = 1024, O = 3072 },
  },
  inputs = function(r, s)
    return { x = r.normal(s.N, s.C), w = r.normal(s.O, s.C), b = r.normal(s.O) }
  end,
  bytes = function(s, width)
    return (s.N * s.C + s.O * s.C + s.N * s.O) * width
  end,
  flops = function(s)
    return 2 * s.N * s.C * s.O
  end,
}
