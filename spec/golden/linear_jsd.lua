return { compared = 5, run = require("spec.golden.ce_tvd").run }
