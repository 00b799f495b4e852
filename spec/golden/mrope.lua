local golden = require("spec.golden")
local rope = require("liger.nn.rope")

local function run(case)
  local o = case.options
  local plane = rope.planes(o.sections, o.layout == "interleaved")
  return golden.rotated_in_planes(case, plane, function(column)
    return column
  end)
end

return { compared = 2, run = run }
