return { compared = 4, run = require("spec.golden.logprob").run }
