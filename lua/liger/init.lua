-- The public surface: re-exports, nothing else.
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local Tensor = require("liger.tensor")
local lib = require("liger.ffi")
local memory = require("liger.memory")

return {
  config = require("liger.train.config").new,
  run = require("liger.train.run").new,
  fn = fn,
  ops = require("liger.ops"),
  autograd = autograd,
  memory = memory,
  tensor = Tensor.from_table,
  empty = Tensor.empty,
  zeros = fn.zeros,
  ones = fn.ones,
  full = fn.full,
  randn = fn.randn,
  rand = fn.rand,
  manual_seed = fn.manual_seed,
  no_grad = autograd.no_grad,
  checkpoint = autograd.checkpoint,
  set_threads = lib.set_threads,
}
