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
    -- keys leave; sinks
    { lengths = { 40, 3, 17 }, H = 4, G = 2, D = 8, size = 4, window = 6, sinks = true },
    { lengths = { 21, 9 }, H = 3, G = 1, D = 20, size = 16, softcap = 0.7 }, -- reached by scores
    -- whole pages and tiles outside of the window; all options together
    { lengths = { 300, 70, 530 }, H = 6, G = 3, D = 64, size = 16, window = 100, softcap = 3,
      sinks = true },
  },
  bench = {
    { lengths = filled(20, 32), H = 4, G = 4, D = 32, size = 16 },
    { lengths = filled(200, 32), H = 9, G = 3, D = 64, size = 16 },
  },
  device_bench = {
    { lengths = filled(2048, 64), H = 32, G = 8, D = 128, size = 16 },
    { lengths = filled(1024, 256), H = 16, G = 8, D = 128, size = 16 },
    { lengths = filled(4096, 64), H = 32, G = 8, D = 128, size = 16, window = 512 },
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
      sinks = s.sinks and r.normal(s.H) or nil,
      page_size = s.size,
      scale = s.D ^ -0.5,
      window = s.window or 0,
      softcap = s.softcap or 0,
    }
  end,
  bytes = function(s, width)
    local keys = 0
    for _, n in ipairs(s.lengths) do
      keys = keys + math.min(s.window or n, n)
    end
    return 2 * keys * s.G * s.D * width
  end,
}
