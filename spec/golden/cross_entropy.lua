return { compared = 10, run = require("spec.golden.linear_cross_entropy").run }
