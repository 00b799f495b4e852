return require("spec.pair")({})
