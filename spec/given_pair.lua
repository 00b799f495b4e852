-- The case of an operator on two matrices of log-probabilities or probabilities, student and
-- teacher: spec/cases/jsd_logp.lua and its kin.
local ops = require("liger.ops")

-- Every third row is ignored, if so wanted.
local function targets(s)
  local y = {}
  for n = 1, s.N do
    y[n] = (s.ignored == "all" or (s.ignored and n % 3 == 1)) and -100 or 0
  end
  return y
end

local SHAPES = {
  { N = 0, V = 5 }, -- nothing to do
  { N = 2, V = 1 }, -- one column
  { N = 4, V = 5, ignored = "all" },
  { N = 7, V = 37, ignored = true }, -- no multiple of a vector
  { N = 40, V = 1030, ignored = true, grad = false }, -- enough for two threads
  { N = 2, V = 20000, grad = false }, -- more than a block takes at a time
}

---@param form { student: "p"|"logp", teacher: fun(s: table): "p"|"logp" }
---@param attributes table  of the operator, besides ignore
---@param shapes? table[]    more of them
return function(form, attributes, shapes)
  local all = {}
  for _, list in ipairs({ SHAPES, shapes or {} }) do
    for _, s in ipairs(list) do
      all[#all + 1] = s
    end
  end
  local function drawn(r, s, kind)
    local p = ops.softmax((r.normal(s.N, s.V)))
    return kind == "p" and p or ops.log(p)
  end
  return {
    shapes = all,
    bench = { { N = 64, V = 49152 } },
    device_bench = { { N = 1024, V = 151936 }, { N = 4096, V = 128256 } },
    inputs = function(r, s)
      local values = {
        student = drawn(r, s, form.student), teacher = drawn(r, s, form.teacher(s)),
        target = r.list(targets(s), "i32"), ignore = -100,
      }
      for name, value in pairs(attributes) do
        values[name] = value
        if s[name] ~= nil then
          values[name] = s[name]
        end
      end
      return values
    end,
    bytes = function(s, width)
      return 2 * s.N * s.V * width
    end,
    bytes_backward = function(s, width)
      return 3 * s.N * s.V * width
    end,
  }
end
