return { compared = 3, run = require("spec.golden.ce_tvd").run }
