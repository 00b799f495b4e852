return {
  shapes = {
    { N = 7, cu = { 0, 7 } }, -- one sequence
    { N = 12, cu = { 0, 3, 3, 11, 12 } }, -- an empty one in the middle, and one token
    { N = 10, cu = { 2, 5, 8 } }, -- not all of the row is covered
    { N = 5, cu = { 0 } }, -- no sequence
    { N = 0, cu = { 0, 0 } }, -- no token
  },
  bench = { { N = 8192, cu = { 0, 1024, 3072, 4096, 8192 } } },
  inputs = function(r, s)
    return { x = r.normal(s.N), cu_seqlens = r.list(s.cu, "i32") }
  end,
  bytes = function(s, width)
    return s.N * width
  end,
}
