-- from: the first slots, one of them twice; to: the last ones.
local function range(first, step, n)
  local y = {}
  for i = 1, n do
    y[i] = first + step * math.max(i - 2, 0)
  end
  return y
end

local function down(first, n)
  local y = {}
  for i = 1, n do
    y[i] = first - i
  end
  return y
end

return {
  shapes = {
    { N = 0, P = 4, G = 2, D = 8 }, -- nothing to do
    { N = 5, P = 20, G = 3, D = 20 },
  },
  bench = { { N = 256, P = 4096, G = 3, D = 64 } },
  inputs = function(r, s)
    return {
      from = r.list(range(0, 1, s.N), "i32"),
      to = r.list(down(s.P, s.N), "i32"),
      k_cache = r.normal(s.P, s.G, s.D),
      v_cache = r.normal(s.P, s.G, s.D),
    }
  end,
  bytes = function(s, width)
    return 4 * s.N * s.G * s.D * width
  end,
}
