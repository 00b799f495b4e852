return require("spec.pair")({}, {
  { N = 3, V = 70, equal = true, grad = false }, -- p = q everywhere: the sign is 0
})
