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
    { lengths = { 9, 4 }, H = 4, G = 2, D = 8, window = 5, sinks = true }, -- keys leave; sinks
    { lengths = { 6, 2 }, H = 2, G = 1, D = 8, softcap = 0.7 }, -- a cap that scores reach
    { lengths = { 20 }, H = 2, G = 2, D = 8, full = true, softcap = 2, sinks = true }, -- not causal
    { lengths = { 7 }, H = 1, G = 1, D = 16, window = 1 }, -- each sees itself alone
    -- windows that start within panels, blocks of queries and of keys; all options together
    { lengths = { 300, 60 }, H = 4, G = 2, D = 64, window = 100, softcap = 3, sinks = true,
      grad = false },
    -- whole tiles of a GPU outside of the window, none of them divided by it
    { lengths = { 530 }, H = 2, G = 1, D = 80, window = 130, sinks = true, grad = false },
    { lengths = { 70 }, H = 2, G = 1, D = 132, window = 33, softcap = 1, grad = false }, -- wide
    { lengths = { 40, 33 }, H = 2, G = 1, D = 32, window = 1000, grad = false }, -- longer than all
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
    { lengths = repeated(4096, 4), H = 32, G = 8, D = 128, window = 512 },
    { lengths = repeated(4096, 4), H = 32, G = 8, D = 128, softcap = 50 },
    { lengths = repeated(4096, 4), H = 64, G = 8, D = 64, window = 128, sinks = true },
  },
  inputs = function(r, s)
    local cu = ends(s.lengths)
    local N = cu[#cu]
    return {
      q = r.normal(N, s.H, s.D),
      k = r.normal(N, s.G, s.D),
      v = r.normal(N, s.G, s.D),
      cu_seqlens = r.list(cu, "i32"),
      sinks = s.sinks and r.normal(s.H) or nil,
      scale = s.D ^ -0.5,
      causal = not s.full,
      window = s.window or 0,
      softcap = s.softcap or 0,
    }
  end,
  bytes = function(s, width)
    local cu = ends(s.lengths)
    return 2 * cu[#cu] * (s.H + s.G) * s.D * width
  end,
  flops = function(s)
    local pairs = 0
    for _, n in ipairs(s.lengths) do
      local w = math.min(s.window or n, n)
      pairs = pairs + (s.full and n * n or w * (w + 1) / 2 + (n - w) * w)
    end
    return 4 * pairs * s.H * s.D
  end,
  backward_flops = 2.5, -- of the forward's
}
