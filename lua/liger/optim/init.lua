-- Optimisers, schedules and clipping.
local adamw = require("liger.optim.adamw")
local schedule = require("liger.optim.schedule")

return {
  adamw = adamw.new,
  schedule = schedule.new,
  clip = require("liger.optim.clip"),
}
