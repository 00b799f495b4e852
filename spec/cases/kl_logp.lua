local function teacher(s)
  return s.log_target and "logp" or "p"
end

return require("spec.given_pair")({ student = "logp", teacher = teacher }, { log_target = false }, {
  { N = 5, V = 33, log_target = true, ignored = true },
})
