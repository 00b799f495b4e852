-- The case of an operator on two matrices of logits, student and teacher: spec/cases/ce_tvd.lua and
-- its kin.
local Tensor = require("liger.tensor")

-- Every third row is ignored, if so wanted.
local function targets(s)
  local y, most = {}, math.min(s.V, s.U or s.V)
  for n = 1, s.N do
    y[n] = (s.ignored == "all" or (s.ignored and n % 3 == 1)) and -100 or n * 7 % most
  end
  return y
end

-- -inf in the first columns, and in every fifth of the others.
local function mask(x, first)
  local V, data = x:size(2), x:data()
  for i = 0, x:numel() - 1 do
    if i % V < first or i % V % 5 == 0 then
      data[i] = -math.huge
    end
  end
  return x
end

local SHAPES = {
  { N = 0, V = 5 }, -- nothing to do
  { N = 2, V = 1 }, -- one column: p = q
  { N = 4, V = 5, ignored = "all" },
  { N = 7, V = 37, ignored = true }, -- no multiple of a vector
  { N = 5, V = 33, U = 40, temperature = 0.7 }, -- a teacher with more columns
  { N = 5, V = 40, U = 33, temperature = 2, ignored = true }, -- a student with more
  -- Enough for two threads; a first tile of -inf.
  { N = 20, V = 2056, temperature = 1.3, ignored = true, masked = 1030, grad = false },
  { N = 2, V = 20000, ignored = false, grad = false }, -- a cluster of blocks, in dense vectors
  { N = 2, V = 70001, U = 70016, grad = false }, -- a cluster, in single elements
}

---@param attributes table  of the operator, besides temperature and ignore
---@param shapes? table[]    more of them
return function(attributes, shapes)
  local all = {}
  for _, list in ipairs({ SHAPES, shapes or {} }) do
    for _, s in ipairs(list) do
      all[#all + 1] = s
    end
  end
  return {
    shapes = all,
    bench = { { N = 64, V = 49152 } },
    device_shapes = {
      -- More rows than a GPU has clusters, several for each; some take no part.
      { N = 300, V = 8200, temperature = 1.3, ignored = true, masked = 30 },
      { N = 50, V = 151936, ignored = true },
      { N = 3, V = 262144 }, -- clusters of 16 blocks
    },
    device_bench = { { N = 1024, V = 151936 }, { N = 4096, V = 128256 } },
    inputs = function(r, s)
      local values = {
        student = r.normal(s.N, s.V),
        teacher = r.normal(s.N, s.U or s.V),
        target = r.list(targets(s), "i32"),
        temperature = s.temperature or 1,
        ignore = -100,
      }
      if s.masked then
        mask(values.student, s.masked)
        mask(values.teacher, s.masked)
      end
      if s.equal then
        values.teacher = Tensor.empty(values.student.shape, values.student.dtype)
          :copy_(values.student)
      end
      for name, value in pairs(attributes) do
        values[name] = s[name] or value
      end
      return values
    end,
    bytes = function(s, width)
      return s.N * (s.V + (s.U or s.V)) * width
    end,
    bytes_backward = function(s, width)
      return s.N * (2 * s.V + (s.U or s.V)) * width
    end,
  }
end
