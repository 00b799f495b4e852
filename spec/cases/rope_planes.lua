return {
  shapes = {
    { N = 0, M = 3, R = 8, P = 9 }, -- nothing to do
    { N = 1, M = 1, R = 1, P = 1 },
    { N = 7, M = 3, R = 13, P = 20 }, -- three positions a token
    { N = 900, M = 2, R = 64, P = 50 }, -- enough for two threads
  },
  bench = { { N = 8192, M = 3, R = 64, P = 4096 } },
  inputs = function(r, s)
    return {
      table = r.normal(s.P, s.R), position = r.integer(0, s.P - 1, s.M, s.N),
      plane = r.integer(0, s.M - 1, s.R),
    }
  end,
  bytes = function(s, width)
    return s.N * (2 * s.R * width + s.M * 4)
  end,
}
