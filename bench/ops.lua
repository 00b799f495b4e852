-- Times every operator at its case's bench sizes, forward and backward, beside a copy of 1 GiB (the
-- ceiling of what moves bytes) in the same run: device events, a flushed L2, interleaved rounds.
--   liger run bench/ops.lua --device cuda:0 --dtype bf16 --only rms_norm,swiglu --json ops.jsonl
local ffi = require("ffi")
local liger = require("liger")

package.path = package.path .. ";./?.lua"
local cases = require("spec.case")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local config = liger.config({
  only = "", -- names of operators, with commas between; empty: all
  rounds = 15, -- measurements of each
  json = "", -- file that gets a line a result
  copy_bytes = 2 ^ 30, -- of the copy beside them
})

local C, ctx = lib.C, lib.ctx
local flush = Tensor.empty({ lib.on_cpu and 1 or 2 ^ 26 }, "f32") -- 256 MiB, four times the L2
local seconds = ffi.new("double[1]")

local function time(run)
  flush:fill_(1)
  lib.check(C.lg_timer_start(ctx))
  run()
  lib.check(C.lg_timer_stop(ctx, seconds))
  return seconds[0]
end

local function median(times)
  table.sort(times)
  return times[math.ceil(#times / 2)], times[1]
end

-- Inputs drawn in fp32 and converted, since a device may have no f64.
local function inputs_of(op, case, shape)
  local values = cases.inputs(op, case, shape, config.dtype)
  for _, t in ipairs(op.tensors) do
    if t.role == "output" and not values[t.name] then
      values[t.name] = cases.output(op, t, values, config.dtype):fill_(0)
    end
  end
  return values
end

local function call(op, values)
  local args = {}
  for i, p in ipairs(op.params) do
    args[i] = values[p.name]
  end
  return function()
    ops.raw[op.name](unpack(args, 1, #op.params))
  end
end

local function backward_values(op, values)
  local y = {}
  for _, p in ipairs(op.backward.params) do
    local base = p.name:sub(1, 1) == "d" and p.name:sub(2)
    if base and op.tensor[base] then
      local like = values[base]
      local t = op.backward.tensor[p.name]
      y[p.name] = like and Tensor.empty(like.shape, cases.dtype_of(t, config.dtype)):fill_(0.01)
    else
      y[p.name] = values[p.name]
    end
  end
  return y
end

local wanted = {}
for name in config.only:gmatch("[^,%s]+") do
  wanted[name] = true
end

local rows = {}
local function add(name, what, shape, run, case, backward)
  run() -- warm
  local width = Tensor.dtype_bytes[config.dtype]
  rows[#rows + 1] = {
    name = name, what = what, shape = shape, run = run, times = {},
    bytes = not backward and case.bytes and case.bytes(shape, width) or
      backward and case.bytes_backward and case.bytes_backward(shape, width),
    flops = case.flops and case.flops(shape) * (backward and (case.backward_flops or 2) or 1),
  }
end

local source = Tensor.empty({ config.copy_bytes / 4 }, "f32"):fill_(1)
local target = Tensor.empty({ config.copy_bytes / 4 }, "f32")
rows[1] = {
  name = "copy", what = "1 GiB", shape = { N = config.copy_bytes / 4 }, times = {},
  bytes = 2 * config.copy_bytes,
  run = function()
    ops.copy(source, target)
  end,
}

for _, op in ipairs(cases.ops()) do
  local case = cases.of(op.name)
  if case and (not next(wanted) or wanted[op.name]) then
    for _, shape in ipairs(lib.on_cpu and case.bench or case.device_bench or {}) do
      local values = inputs_of(op, case, shape)
      add(op.name, "fwd", shape, call(op, values), case)
      if op.backward then
        add(op.name, "bwd", shape, call(op.backward, backward_values(op, values)), case, true)
      end
    end
  end
end

for _ = 1, config.rounds do
  for _, row in ipairs(rows) do
    row.times[#row.times + 1] = time(row.run)
  end
end

local json = config.json ~= "" and assert(io.open(config.json, "a"))
local copy_rate
print(ffi.string(C.lg_context_describe(ctx)))
for _, row in ipairs(rows) do
  local t, least = median(row.times)
  local text = ("%-22s %-3s %s [%s]  %.1f us (min %.1f)"):format(
    row.name, row.what, config.dtype, cases.text(row.shape), t * 1e6, least * 1e6
  )
  if row.bytes then
    local rate = row.bytes / t
    copy_rate = copy_rate or rate
    text = text .. ("  %.0f GB/s  %.0f%% of copy"):format(rate / 1e9, 100 * rate / copy_rate)
  end
  if row.flops then
    text = text .. ("  %.1f TFLOP/s"):format(row.flops / t / 1e12)
  end
  print(text)
  if json then
    json:write(require("cjson").encode({
      op = row.name, what = row.what, dtype = config.dtype, shape = row.shape, us = t * 1e6,
      min_us = least * 1e6, bytes = row.bytes or nil, flops = row.flops or nil,
      copy_gbs = copy_rate / 1e9, device = ffi.string(C.lg_context_describe(ctx)),
    }), "\n")
  end
end
