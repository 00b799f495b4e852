return { compared = 6, run = require("spec.golden.ce_tvd").run }
