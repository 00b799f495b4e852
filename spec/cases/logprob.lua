-- K targets a row; every third row has none, if so wanted, and the last target of every second row
-- repeats its first.
local function targets(s)
  local y = {}
  for n = 1, s.N do
    y[n] = {}
    for k = 1, s.K do
      local none = s.ignored == "all" or (s.ignored and (n % 3 == 1 or (n + k) % 5 == 0))
      y[n][k] = none and -100 or (n * 7 + (k == s.K and n % 2 == 0 and 1 or k) * 5) % s.V
    end
  end
  return y
end

return {
  shapes = {
    { N = 0, K = 1, V = 5 }, -- nothing to do
    { N = 1, K = 1, V = 1 }, -- one token in the vocabulary: logp 0
    { N = 4, K = 1, V = 5, ignored = "all" }, -- no row is read
    { N = 6, K = 0, V = 19 }, -- entropies alone
    { N = 7, K = 1, V = 37, temperature = 0.7, ignored = true }, -- no multiples of a vector
    { N = 5, K = 3, V = 33, ignored = true }, -- several targets a row, some equal
    { N = 40, K = 1, V = 1030, temperature = 1.3, ignored = true, grad = false }, -- two threads
    { N = 3, K = 1, V = 33333, infinite = 32900, grad = false }, -- blocks of -inf (B12)
    { N = 3, K = 2, V = 33333, grad = false }, -- more than a block reads at once
  },
  device_shapes = {
    { N = 3, K = 1, V = 151936 }, -- vocabularies of real models
    { N = 5, K = 2, V = 128256, temperature = 0.7, ignored = true },
  },
  bench = { { N = 2560, K = 1, V = 256 }, { N = 256, K = 1, V = 49152 } },
  device_bench = { { N = 2048, K = 1, V = 32000 }, { N = 8192, K = 1, V = 151936 } },
  inputs = function(r, s)
    local z, target = r.normal(s.N, s.V), targets(s)
    return {
      logits = s.infinite and r.masked(z, s.infinite, target) or z,
      target = s.N * s.K > 0 and r.list(target, "i32") or r.integer(0, 0, s.N, s.K),
      temperature = s.temperature or 1,
      ignore = -100,
    }
  end,
  bytes = function(s, width)
    return s.N * s.V * width
  end,
  bytes_backward = function(s, width)
    return 2 * s.N * s.V * width
  end,
}
