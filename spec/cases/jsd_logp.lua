local LOGP = { student = "logp", teacher = function() return "logp" end }

return require("spec.given_pair")(LOGP, { beta = 0.5 }, {
  { N = 5, V = 33, beta = 0, ignored = true },
  { N = 5, V = 33, beta = 1, ignored = true },
  { N = 5, V = 33, beta = 0.1 },
})
