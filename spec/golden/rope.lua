local golden = require("spec.golden")

local function run(case)
  local at = golden.rows_in_order(case.get("in.q"):size(1))
  return golden.rotated(case, case.get("in.cos"), case.get("in.sin"), at,
    case.options.style == "interleaved")
end

return { compared = 4, run = run }
