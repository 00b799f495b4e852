local function lattice(r, n, step)
  local x = {}
  for i = 1, n do
    x[i] = i * step % 5 - 2
  end
  return r.list(x)
end

return {
  shapes = {
    { N = 0 }, -- nothing to do
    { N = 1 },
    { N = 200 }, -- small whole numbers: many pairs are equal
  },
  bench = { { N = 1048576 } },
  inputs = function(r, s)
    return { a = lattice(r, s.N, 7), b = lattice(r, s.N, 3) }
  end,
  bytes = function(s, width)
    return 3 * s.N * width
  end,
}
