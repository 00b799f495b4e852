return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 3 }, -- less than one Philox block
    { N = 1025 }, -- one more than a thread's piece
  },
  bench = { { N = 1048576 } },
  device_bench = { { N = 67108864 } },
  inputs = function(r, s)
    return { seed = 1234567890123, stream = 5, y = r.normal(s.N) }
  end,
  bytes = function(s, width)
    return s.N * width
  end,
}
