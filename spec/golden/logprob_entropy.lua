return { compared = 3, run = require("spec.golden.logprob").run }
