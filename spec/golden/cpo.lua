local golden_preference = require("spec.golden_preference")
local cpo = require("liger.loss.cpo")

local function run(case)
  return golden_preference.run(case, cpo.options(golden_preference.options(case)), cpo, {})
end

return { compared = 6, run = run }
