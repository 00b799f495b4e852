return require("spec.pair")({ beta = 0.5 }, {
  { N = 5, V = 33, beta = 0, temperature = 1.5, ignored = true }, -- KL(teacher || student)
  { N = 5, V = 33, beta = 1, temperature = 1.5, ignored = true }, -- KL(student || teacher)
  { N = 5, V = 33, beta = 0.1 },
  { N = 3, V = 70, equal = true }, -- 0, and a gradient of 0
})
