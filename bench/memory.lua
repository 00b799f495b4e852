-- Bytes that a loss on a head takes beyond its inputs, at their peak, and what it keeps for its
-- backward. bench/peers/memory.py measures the unfused way.
--   liger run bench/memory.lua --device cuda:0 --dtype bf16
local liger = require("liger")
local autograd = require("liger.autograd")
local fn = liger.fn
local lib = require("liger.ffi")
local memory = require("liger.memory")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local config = liger.config({
  sequences = 8, -- of the preference loss: the first half chosen, the second rejected
  length = 1024,
  hidden = 4096,
  vocab = 128256,
  rows = 4096, -- of the distillation loss on logits
  out = "", -- no run folder is made
})

local function normal(stream, std, ...)
  local x = Tensor.empty({ ... }, config.dtype)
  ops.random_normal(1, stream, 0, std, x)
  return x
end

local function targets(N)
  local list = {}
  for i = 1, N do
    list[i] = (i * 7919) % config.vocab
  end
  return Tensor.from_table(list, "i32")
end

-- The peak of f() over what lives before it, with the operators' scratch.
local function peak_of(f)
  lib.check(lib.C.lg_sync(lib.ctx))
  local before = memory.stats().live
  memory.reset_peak()
  f()
  lib.check(lib.C.lg_sync(lib.ctx))
  return memory.stats().peak - before + memory.by_owner().scratch
end

-- Hidden states as a model makes them: their gradient goes on into it.
local function hidden(x)
  local weight = liger.zeros(1):requires_grad_()
  return autograd.rule("hidden", function() return x end, function() end)(weight)
end

local function dpo()
  local N, C, V = config.sequences * config.length, config.hidden, config.vocab
  local x, w = hidden(normal(1, 1, N, C)), normal(2, 0.02, V, C):requires_grad_()
  local ref_x, ref_w = normal(3, 1, N, C), normal(4, 0.02, V, C)
  local target, starts = targets(N), {}
  for s = 0, config.sequences do
    starts[s + 1] = s * config.length
  end
  local cu, pairs_of = Tensor.from_table(starts, "i32"), config.sequences / 2
  return peak_of(function()
    local ref = liger.no_grad(fn.linear_logprob, ref_x, ref_w, target)
    local logp = fn.linear_logprob(x, w, target)
    local ratio = ops.segment_sum(logp - ref, cu)
    local margin = ratio:narrow(1, 1, pairs_of) - ratio:narrow(1, pairs_of + 1, pairs_of)
    fn.sum((margin * 0.1):log_sigmoid() * (-1 / pairs_of)):backward()
  end)
end

local function ce_tvd()
  local student = normal(5, 1, config.rows, config.vocab):requires_grad_()
  local teacher, target = normal(6, 1, config.rows, config.vocab), targets(config.rows)
  local before = memory.stats().live
  local ce, tvd = ops.ce_tvd(student, teacher, target, 1, -100)
  local kept = memory.stats().live - before
  fn.sum(ce + tvd):backward()
  return kept / config.rows
end

local MIB = 2 ^ 20
local bytes = memory.scope(dpo)
print(("fused DPO, %d x %d tokens, C %d, V %d: %.0f MiB beyond the inputs, of them %.0f the fp32 "
  .. "gradient of the head"):format(config.sequences, config.length, config.hidden, config.vocab,
  bytes / MIB, config.hidden * config.vocab * 4 / MIB))
print(("ce_tvd keeps %.0f bytes a token between forward and backward"):format(
  memory.scope(ce_tvd)))
