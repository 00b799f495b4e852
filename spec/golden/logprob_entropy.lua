return { compared = 3, run = require("spec.golden.linear_logprob").run }
