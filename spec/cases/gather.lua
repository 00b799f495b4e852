return {
  shapes = {
    { S = 1, N = 1 },
    { S = 9, N = 40 }, -- every element read several times
    { S = 40, N = 9 }, -- some are not read: their gradient is 0
    { S = 9, N = 0 }, -- nothing to do
  },
  bench = { { S = 8192, N = 65536 } },
  device_bench = { { S = 8192, N = 65536 } },
  inputs = function(r, s)
    return { x = r.normal(s.S), index = r.integer(0, s.S - 1, s.N) }
  end,
  bytes = function(s, width)
    return 2 * s.N * width + 4 * s.N
  end,
}
