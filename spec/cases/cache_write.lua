-- Every slot at most once, not in order.
local function slots(n, P)
  local y = {}
  for i = 1, n do
    y[i] = i * 7 % P
  end
  return y
end

return {
  shapes = {
    { N = 0, P = 4, G = 2, D = 8 }, -- nothing to do
    { N = 5, P = 20, G = 3, D = 20 },
    { N = 96, P = 97, G = 1, D = 1 }, -- nearly all slots
  },
  bench = { { N = 32, P = 4096, G = 3, D = 64 }, { N = 2048, P = 4096, G = 3, D = 64 } },
  device_bench = { { N = 8192, P = 16384, G = 8, D = 128 } },
  inputs = function(r, s)
    return {
      k = r.normal(s.N, s.G, s.D),
      v = r.normal(s.N, s.G, s.D),
      slot = r.list(slots(s.N, s.P), "i32"),
      k_cache = r.normal(s.P, s.G, s.D),
      v_cache = r.normal(s.P, s.G, s.D),
    }
  end,
  bytes = function(s, width)
    return 4 * s.N * s.G * s.D * width
  end,
}
