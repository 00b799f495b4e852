-- Every third row is ignored, if so wanted.
local function targets(s)
  local y = {}
  for n = 1, s.N do
    y[n] = (s.ignored == "all" or (s.ignored and n % 3 == 1)) and -100 or n * 7 % s.V
  end
  return y
end

return {
  shapes = {
    { N = 0, V = 5 }, -- nothing to do
    { N = 1, V = 1 }, -- one class: loss 0
    { N = 4, V = 5, ignored = "all" }, -- no row is read (B01)
    { N = 7, V = 37, ignored = true }, -- no multiples of a vector
    { N = 5, V = 33, softcap = 2, smoothing = 0.1 }, -- the cap's tail lanes (B05)
    { N = 6, V = 64, softcap = 3, smoothing = 0.3, weighted = true, ignored = true },
    { N = 40, V = 1030, weighted = true, ignored = true, grad = false }, -- two threads
    { N = 3, V = 33333, infinite = 32900, grad = false }, -- blocks of -inf (B12)
    { N = 3, V = 33333, smoothing = 0.1, grad = false }, -- more than a block reads at once
  },
  device_shapes = {
    { N = 3, V = 151936 }, -- vocabularies of real models
    { N = 5, V = 128256, softcap = 3, smoothing = 0.1, weighted = true, ignored = true },
  },
  bench = { { N = 2560, V = 256 }, { N = 256, V = 49152 } },
  device_bench = { { N = 8192, V = 32000 }, { N = 8192, V = 151936 } },
  inputs = function(r, s)
    local z, target = r.normal(s.N, s.V), targets(s)
    return {
      logits = s.infinite and r.masked(z, s.infinite, target) or z,
      target = r.list(target, "i32"),
      class_weight = s.weighted and r.uniform(0.5, 2, s.V) or nil,
      label_smoothing = s.smoothing or 0,
      softcap = s.softcap or 0,
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
