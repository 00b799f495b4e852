return {
  shapes = {
    { B = 0, V = 11 }, -- nothing to do
    { B = 1, V = 1 }, -- one candidate
    { B = 5, V = 11 }, -- no cut
    { B = 5, V = 11, k = 1 }, -- argmax
    { B = 3, V = 300, k = 40, p = 0.9 }, -- all cuts, more than a block
    { B = 3, V = 300, p = 0.5, m = 0.05 },
    { B = 2, V = 20011, k = 500 }, -- the cut starts from the blocks' largest logits
    { B = 9, V = 8209, p = 0.95 }, -- enough for two threads
  },
  device_shapes = {
    { B = 3, V = 151936 }, -- vocabularies of real models
    { B = 3, V = 128256, k = 50 },
    { B = 3, V = 151936, p = 0.9 },
  },
  bench = { { B = 8, V = 50257 }, { B = 8, V = 50257, k = 50 }, { B = 8, V = 50257, p = 0.9 } },
  device_bench = {
    { B = 256, V = 151936 },
    { B = 256, V = 151936, k = 50 },
    { B = 256, V = 151936, p = 0.9 },
  },
  inputs = function(r, s)
    local sequence = {}
    for b = 1, s.B do
      sequence[b] = b * 1000003
    end
    return {
      z = r.normal(s.B, s.V),
      sequence = r.list(sequence, "i64"),
      position = r.integer(0, 100000, s.B),
      seed = 42,
      top_k = s.k or 0,
      top_p = s.p or 1,
      min_p = s.m or 0,
    }
  end,
  bytes = function(s, width)
    return s.B * s.V * width
  end,
}
