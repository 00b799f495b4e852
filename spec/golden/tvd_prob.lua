return { compared = 2, run = require("spec.golden.jsd_logp").run }
