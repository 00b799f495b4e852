-- a has multiples of 1/16 and b has halves between them: no two are nearly equal.
local function lattice(r, n, step, half)
  local x = {}
  for i = 1, n do
    x[i] = (i * step % 61 - 30 + half) / 16
  end
  return r.list(x)
end

return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 77 }, -- not a multiple of a vector
  },
  bench = { { N = 1048576 } },
  inputs = function(r, s)
    return { a = lattice(r, s.N, 37, 0), b = lattice(r, s.N, 23, 0.5) }
  end,
  bytes = function(s, width)
    return 3 * s.N * width
  end,
}
