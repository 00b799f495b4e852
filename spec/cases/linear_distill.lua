-- Every third row is ignored, if so wanted.
local function targets(s)
  local y, most = {}, math.min(s.V, s.U or s.V)
  for n = 1, s.N do
    y[n] = (s.ignored == "all" or (s.ignored and n % 3 == 1)) and -100 or n * 7 % most
  end
  return y
end

-- Of these how many are not ignored, where the op is told.
local function kept(s)
  return not s.told and -1 or s.ignored == "all" and 0
    or s.ignored and s.N - math.ceil(s.N / 3) or s.N
end

local TVD, JSD, COSINE = 0, 1, 2

return {
  shapes = {
    { N = 0, C = 8, K = 8, V = 5 }, -- nothing to do
    { N = 2, C = 2, K = 3, V = 1 }, -- one token in the vocabulary
    { N = 4, C = 8, K = 8, V = 5, ignored = "all" }, -- no row takes part (B22)
    { N = 7, C = 19, K = 11, V = 37, U = 40, ignored = true }, -- a teacher with more columns
    { N = 7, C = 19, K = 11, V = 40, U = 37, ignored = true, divergence = JSD }, -- with fewer
    { N = 6, C = 8, K = 16, V = 33, divergence = JSD, beta = 0, temperature = 2 },
    { N = 6, C = 8, K = 16, V = 33, divergence = JSD, beta = 1, temperature = 0.7 },
    { N = 6, C = 8, K = 16, V = 33, divergence = COSINE, temperature = 2 },
    { N = 40, C = 24, K = 16, V = 1030, softcap = 3, ignored = true }, -- enough for two threads
    { N = 9, C = 16, K = 8, V = 130, softcap = 4, temperature = 2, divergence = JSD },
    { N = 2, C = 8, K = 8, V = 20002, divergence = JSD }, -- a cluster of blocks
    { N = 2100, C = 8, K = 12, V = 19, ignored = true, divergence = JSD }, -- gathered rows
    { N = 4200, C = 8, K = 12, V = 19, divergence = JSD }, -- more than a chunk of rows
    -- The host knows how many rows take part: none, some, all.
    { N = 4, C = 8, K = 8, V = 5, ignored = "all", told = true },
    { N = 7, C = 19, K = 11, V = 37, U = 40, ignored = true, told = true },
    { N = 9, C = 16, K = 8, V = 130, softcap = 4, divergence = JSD, told = true },
  },
  device_shapes = {
    -- Told: chunks of rows that are gathered.
    { N = 6600, C = 8, K = 12, V = 19, ignored = true, divergence = JSD, told = true },
  },
  bench = { { N = 512, C = 128, K = 256, V = 256 } },
  device_bench = { { N = 4096, C = 2048, K = 4096, V = 128256 } },
  inputs = function(r, s)
    local U = s.U or s.V
    return {
      x = r.normal(s.N, s.C),
      w = r.normal(s.V, s.C),
      b = r.normal(s.V),
      teacher_x = r.normal(s.N, s.K),
      teacher_w = r.normal(U, s.K),
      teacher_b = r.normal(U),
      target = r.list(targets(s), "i32"),
      weight_hard = r.uniform(0.1, 0.3, s.N),
      weight_soft = r.uniform(0.5, 1, s.N),
      divergence = s.divergence or TVD,
      beta = s.beta or 0.5,
      temperature = s.temperature or 1,
      softcap = s.softcap or 0,
      teacher_softcap = (s.softcap or 0) * 2,
      ignore = -100,
      kept = kept(s),
    }
  end,
  bytes = function(s, width)
    local U = s.U or s.V
    return (s.N * (2 * s.C + s.K) + s.V * s.C + U * s.K) * width + 4 * s.V * s.C + 8 * s.N
  end,
  flops = function(s)
    return 2 * s.N * (3 * s.C * s.V + s.K * (s.U or s.V))
  end,
}
