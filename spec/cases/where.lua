return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 77 }, -- not a multiple of a vector
  },
  bench = { { N = 1048576 } },
  inputs = function(r, s)
    local mask = {}
    for i = 1, s.N do
      mask[i] = i * 5 % 7 % 3 -- 0, 1 and 2: all but 0 is true
    end
    return { mask = r.list(mask), a = r.normal(s.N), b = r.normal(s.N) }
  end,
  bytes = function(s, width)
    return 4 * s.N * width
  end,
  bytes_backward = function(s, width)
    return 4 * s.N * width
  end,
}
