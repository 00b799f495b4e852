-- Every third row is ignored, if so wanted.
local function targets(s)
  local y = {}
  for n = 1, s.N do
    y[n] = (s.ignored == "all" or (s.ignored and n % 3 == 1)) and -100 or n * 7 % s.V
  end
  return y
end

-- Of these how many are not ignored, where the op is told.
local function kept(s)
  return not s.told and -1 or s.ignored == "all" and 0
    or s.ignored and s.N - math.ceil(s.N / 3) or s.N
end

return {
  shapes = {
    { N = 0, C = 8, V = 5 }, -- nothing to do
    { N = 1, C = 2, V = 1 }, -- one token in the vocabulary: logp 0
    { N = 4, C = 8, V = 5, ignored = "all" }, -- no row takes part
    { N = 7, C = 19, V = 37, temperature = 0.7, ignored = true }, -- no multiples of a vector
    { N = 5, C = 16, V = 33, softcap = 5 },
    -- Enough for two threads.
    -- The cap leaves the largest apart: in fp32 they would tie, and be predicted otherwise.
    { N = 40, C = 24, V = 1030, temperature = 1.3, softcap = 9, ignored = true, grad = false },
    { N = 2100, C = 8, V = 19, ignored = true, grad = false }, -- gathered rows
    { N = 2100, C = 8, V = 19, grad = false }, -- more than a chunk of rows
    -- The host knows how many rows take part: none, some, all.
    { N = 4, C = 8, V = 5, ignored = "all", told = true },
    { N = 7, C = 19, V = 37, ignored = true, told = true },
    { N = 5, C = 16, V = 33, softcap = 5, told = true },
  },
  device_shapes = {
    { N = 3, C = 40, V = 151936 }, -- vocabularies of real models: eight blocks a row
    { N = 5, C = 24, V = 128256, temperature = 0.7, ignored = true },
    -- The backward goes over rectangles: two of rows, three of columns, none whole.
    { N = 4200, C = 16, V = 9001, temperature = 1.3, softcap = 20, ignored = true },
    { N = 4200, C = 16, V = 9001 },
    -- Told: chunks of rows that are gathered, and of rows that are not.
    { N = 6600, C = 16, V = 190, ignored = true, told = true },
    { N = 4200, C = 16, V = 190, told = true },
  },
  bench = { { N = 2560, C = 128, V = 256 }, { N = 1024, C = 576, V = 49152 } },
  device_bench = { { N = 4096, C = 4096, V = 128256 }, { N = 8192, C = 1024, V = 151936 } },
  inputs = function(r, s)
    return {
      x = r.normal(s.N, s.C),
      w = r.normal(s.V, s.C),
      b = r.normal(s.V),
      target = r.list(targets(s), "i32"),
      temperature = s.temperature or 1,
      softcap = s.softcap or 0,
      ignore = -100,
      kept = kept(s),
    }
  end,
  bytes = function(s, width)
    return (s.N * s.C + s.V * s.C) * width + 12 * s.N
  end,
  flops = function(s)
    return 2 * s.N * s.C * s.V
  end,
}
