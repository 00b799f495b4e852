local function ends(lengths)
  local cu = { 0 }
  for i, n in ipairs(lengths) do
    cu[i + 1] = cu[i] + n
  end
  return cu
end

local function repeated(n, count)
  local y = {}
  for i = 1, count do
    y[i] = n
  end
  return y
end

return {
  shapes = {
    { lengths = {}, H = 2, G = 1, D = 8 }, -- no sequence
    { lengths = { 1 }, H = 1, G = 1, D = 8 }, -- one token
    { lengths = { 5, 0, 3 }, H = 4, G = 2, D = 8 }, -- grouped heads, an empty sequence
    { lengths = { 5, 3 }, H = 2, G = 2, D = 8, full = true }, -- not causal
    { lengths = { 18, 17 }, H = 3, G = 1, D = 20 }, -- two panels of keys; an odd head
    { lengths = { 150, 3 }, H = 2, G = 1, D = 64, grad = false }, -- two blocks of queries
    { lengths = { 270 }, H = 3, G = 3, D = 48, full = true, grad = false }, -- keys in two blocks
    { lengths = { 40 }, H = 1, G = 1, D = 256, grad = false }, -- the widest head
  },
  bench = {
    { lengths = repeated(10, 256), H = 4, G = 4, D = 32 },
    { lengths = repeated(128, 8), H = 9, G = 3, D = 64 },
    { lengths = { 2048 }, H = 9, G = 3, D = 64 },
  },
  device_bench = {
    { lengths = repeated(4096, 4), H = 32, G = 8, D = 128 },
    { lengths = repeated(4096, 4), H = 32, G = 8, D = 128, full = true },
    { lengths = repeated(1024, 16), H = 16, G = 8, D = 64 },
  },
  inputs = function(r, s)
    local cu = ends(s.lengths)
    local N = cu[#cu]
    return {
      q = r.normal(N, s.H, s.D),
      k = r.normal(N, s.G, s.D),
      v = r.normal(N, s.G, s.D),
      cu_seqlens = r.list(cu, "i32"),
      scale = s.D ^ -0.5,
      causal = not s.full,
    }
  end,
  bytes = function(s, width)
    local cu = ends(s.lengths)
    return 2 * cu[#cu] * (s.H + s.G) * s.D * width
  end,
  flops = function(s)
    local pairs = 0
    for _, n in ipairs(s.lengths) do
      pairs = pairs + (s.full and n * n or n * (n + 1) / 2)
    end
    return 4 * pairs * s.H * s.D
  end,
  backward_flops = 2.5, -- of the forward's
}
