return { compared = 4, run = require("spec.golden.linear_logprob").run }
