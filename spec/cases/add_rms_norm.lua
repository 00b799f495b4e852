-- Sixteenths, whose sums bf16 holds: every precision normalises the same s.
local function sixteenths(r, s)
  return r.integer(-60, 60, s.N, s.C):to("f32") * (1 / 16)
end

return {
  shapes = {
    { N = 0, C = 8 }, -- nothing to do
    { N = 1, C = 2 },
    { N = 5, C = 33 }, -- not a multiple of a vector
    { N = 6, C = 40, offset = 1, round = false }, -- Gemma
    { N = 70, C = 48 }, -- dw sums two blocks of rows
    { N = 3, C = 1100, grad = false }, -- more than a block of a sum
    { N = 2, C = 17000, grad = false }, -- longer than a device holds
    { N = 2100, C = 64, grad = false }, -- enough for two threads
  },
  bench = { { N = 2560, C = 128 }, { N = 4096, C = 2048 } },
  device_bench = { { N = 8192, C = 4096 }, { N = 32768, C = 2048 } },
  inputs = function(r, s)
    return {
      x = sixteenths(r, s), residual = sixteenths(r, s), w = r.normal(s.C), eps = 1e-5,
      offset = s.offset or 0, round = s.round ~= false,
    }
  end,
  bytes = function(s, width)
    return 4 * s.N * s.C * width
  end,
  bytes_backward = function(s, width)
    return 5 * s.N * s.C * width -- dx and dresidual
  end,
}
