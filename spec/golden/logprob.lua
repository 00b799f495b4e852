return { compared = 5, run = require("spec.golden.linear_logprob").run }
