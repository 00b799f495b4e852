return { compared = 1, run = require("spec.golden.ce_tvd").run }
