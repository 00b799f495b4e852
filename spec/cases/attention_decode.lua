-- Pages of all rows in one cache, scattered.
local function pages(B, M)
  local y = {}
  for b = 1, B do
    y[b] = {}
    for m = 1, M do
      y[b][m] = ((b - 1) * M + m) * 7 % 1009 % (B * M + 1)
    end
  end
  return y
end

local function filled(n, count)
  local y = {}
  for i = 1, count do
    y[i] = n
  end
  return y
end

return {
  shapes = {
    { lengths = {}, H = 2, G = 1, D = 8, size = 4 }, -- no row
    { lengths = { 1 }, H = 1, G = 1, D = 8, size = 1 }, -- one key
    { lengths = { 5, 12, 1 }, H = 4, G = 2, D = 8, size = 4 }, -- grouped heads; full and part pages
    { lengths = { 37, 16 }, H = 5, G = 1, D = 20, size = 5 }, -- pages across panels of 16 keys
    { lengths = { 300, 70, 130 }, H = 6, G = 3, D = 64, size = 16 }, -- enough for two threads
  },
  bench = {
    { lengths = filled(20, 32), H = 4, G = 4, D = 32, size = 16 },
    { lengths = filled(200, 32), H = 9, G = 3, D = 64, size = 16 },
  },
  device_bench = {
    { lengths = filled(2048, 64), H = 32, G = 8, D = 128, size = 16 },
    { lengths = filled(1024, 256), H = 16, G = 8, D = 128, size = 16 },
  },
  inputs = function(r, s)
    local B, longest = #s.lengths, 1
    for _, n in ipairs(s.lengths) do
      longest = math.max(longest, n)
    end
    local M = math.ceil(longest / s.size)
    local page = B > 0 and r.list(pages(B, M), "i32") or r.integer(0, 0, 0, M)
    local P = (B * M + 1) * s.size
    return {
      q = r.normal(B, s.H, s.D),
      k_cache = r.normal(P, s.G, s.D),
      v_cache = r.normal(P, s.G, s.D),
      page = page,
      length = r.list(s.lengths, "i32"),
      page_size = s.size,
      scale = s.D ^ -0.5,
    }
  end,
  bytes = function(s, width)
    local keys = 0
    for _, n in ipairs(s.lengths) do
      keys = keys + n
    end
    return 2 * keys * s.G * s.D * width
  end,
}
