return { compared = 3, run = require("spec.golden.jsd_logp").run }
