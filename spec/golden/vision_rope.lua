local golden = require("spec.golden")
local rope = require("liger.nn.rope")

-- The columns of a plane's table serve both planes.
local function run(case)
  local R = case.options.rotary_dim / 2
  return golden.rotated_in_planes(case, rope.planes({ R, R }), function(column)
    return column % R
  end)
end

return { compared = 1, run = run }
