-- Multiples of 1/16 and half of one: no value is near the kink.
local function lattice(r, n, step)
  local x = {}
  for i = 1, n do
    x[i] = (i * step % 61 - 30 + 0.5) / 16
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
    return { x = lattice(r, s.N, 37) }
  end,
  bytes = function(s, width)
    return 2 * s.N * width
  end,
}
