return { compared = 2, run = require("spec.golden.ce_tvd").run }
