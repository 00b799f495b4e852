local ffi = require("ffi")
local lib = require("liger.ffi")

local function philox(seed, subsequence, offset, n)
  local words, list = ffi.new("uint32_t[?]", n), {}
  lib.C.lg_philox(seed, subsequence, offset, n, words)
  for i = 1, n do
    list[i] = words[i - 1]
  end
  return list
end
local function run(case)
  local seed, offset = case.get("in.seed"):data(), case.get("in.offset"):data()
  local subsequence = case.get("in.subsequence"):data()
  local words, uniform = {}, {}
  for i = 1, case.get("in.seed"):numel() do
    words[i] = philox(seed[i - 1], subsequence[i - 1], offset[i - 1], case.options.count)
    uniform[i] = {}
    for k, word in ipairs(words[i]) do
      uniform[i][k] = word * 2 ^ -32 + 2 ^ -33
    end
  end
  return { ["out.words"] = words, ["out.uniform"] = uniform }
end

return { compared = 1, run = run, only_f64 = true }
