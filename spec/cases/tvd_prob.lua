return require("spec.given_pair")({ student = "p", teacher = function() return "p" end }, {})
