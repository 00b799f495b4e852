local Tensor = require("liger.tensor")

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

-- K ids a row with 0.3 to 0.9 of the probability together; every fourth entry is none.
local function known(r, s)
  local id, logp = Tensor.stage({ s.N, s.K }, "i32"), Tensor.stage({ s.N, s.K }, "f32")
  local ids, data = id:data(), logp:data()
  local drawn, share = r.normal(s.N, s.K):read(), r.uniform(0.3, 0.9, s.N):read()
  for n = 0, s.N - 1 do
    local total = 0
    for k = 0, s.K - 1 do
      local at = n * s.K + k
      ids[at] = k % 4 == 3 and -1 or (n * 5 + k * 3) % s.V
      data[at] = k % 4 == 3 and -math.huge or drawn[at]
      total = total + math.exp(data[at])
    end
    for k = 0, s.K - 1 do
      data[n * s.K + k] = data[n * s.K + k] - math.log(total) + math.log(share[n])
    end
  end
  return id, logp
end

local TVD, JSD, COSINE = 0, 1, 2

return {
  shapes = {
    { N = 0, C = 8, K = 2, V = 5 }, -- nothing to do
    { N = 2, C = 2, K = 1, V = 1 }, -- nothing is left over
    { N = 4, C = 8, K = 2, V = 5, ignored = "all" },
    { N = 7, C = 19, K = 5, V = 37, ignored = true },
    { N = 7, C = 19, K = 5, V = 37, divergence = JSD, softcap = 4 },
    { N = 6, C = 8, K = 16, V = 65, divergence = JSD, beta = 0, temperature = 2 },
    { N = 6, C = 8, K = 16, V = 65, divergence = COSINE },
    { N = 40, C = 24, K = 9, V = 1030, ignored = true, divergence = JSD, beta = 1 }, -- two threads
    -- The host knows how many rows take part.
    { N = 7, C = 19, K = 5, V = 37, ignored = true, told = true },
  },
  bench = { { N = 512, C = 128, K = 16, V = 256 } },
  device_bench = { { N = 4096, C = 2048, K = 64, V = 128256 } },
  inputs = function(r, s)
    local id, logp = known(r, s)
    return {
      x = r.normal(s.N, s.C),
      w = r.normal(s.V, s.C),
      b = r.normal(s.V),
      teacher_id = id,
      teacher_logp = logp,
      target = r.list(targets(s), "i32"),
      weight_hard = r.uniform(0.1, 0.3, s.N),
      weight_soft = r.uniform(0.5, 1, s.N),
      divergence = s.divergence or TVD,
      beta = s.beta or 0.5,
      temperature = s.temperature or 1,
      softcap = s.softcap or 0,
      ignore = -100,
      kept = kept(s),
    }
  end,
  bytes = function(s, width)
    return (2 * s.N * s.C + s.V * s.C) * width + 4 * s.V * s.C + 8 * s.N * (s.K + 1)
  end,
  flops = function(s)
    return 6 * s.N * s.C * s.V
  end,
}
