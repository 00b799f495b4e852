return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 77 }, -- not a multiple of a vector
    { N = 5, scale = 200 }, -- where e^x and e^-x leave fp32
  },
  bench = { { N = 1048576 } },
  inputs = function(r, s)
    local scale = s.scale or 1
    return { x = r.uniform(-scale, scale, s.N) }
  end,
  bytes = function(s, width)
    return 2 * s.N * width
  end,
}
