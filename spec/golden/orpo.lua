local golden_preference = require("spec.golden_preference")
local orpo = require("liger.loss.orpo")
local Tensor = require("liger.tensor")

local function run(case)
  local options = orpo.options(golden_preference.options(case))
  return golden_preference.run(case, options, orpo, {
    target = "nll_target",
    fill = function(batch, of)
      -- Answers are the sequences' ends.
      local target, starts = case.get("in.target", "i32"):data(), {}
      for s = 1, #of.start - 1 do
        local answer = 0
        for k = of.start[s] + 1, of.start[s + 1] do
          answer = answer + (target[of.rows[k]] ~= -100 and 1 or 0)
        end
        starts[#starts + 1] = of.start[s]
        starts[#starts + 1] = of.start[s + 1] - answer
      end
      starts[#starts + 1] = of.start[#of.start]
      batch.answer_cu = Tensor.from_table(starts, "i32")
    end,
  })
end

return { compared = 2, run = run }
