return {
  shapes = {
    {}, -- a scalar, as losses are
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 77 }, -- not a multiple of a vector
    { N = 131075, grad = false }, -- enough for two threads, and a tail
  },
  bench = { { N = 1048576 }, { N = 16777216 } },
  device_bench = { { N = 67108864 } },
  inputs = function(r, s)
    if not s.N then
      return { a = r.normal(), b = r.normal() }
    end
    return { a = r.normal(s.N), b = r.normal(s.N) }
  end,
  bytes = function(s, width)
    return 3 * s.N * width
  end,
  bytes_backward = function(s, width)
    return 3 * s.N * width
  end,
}
