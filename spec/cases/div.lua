return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 77 }, -- not a multiple of a vector
  },
  bench = { { N = 1048576 } },
  inputs = function(r, s)
    return { a = r.normal(s.N), b = r.uniform(0.5, 2, s.N) }
  end,
  bytes = function(s, width)
    return 3 * s.N * width
  end,
}
