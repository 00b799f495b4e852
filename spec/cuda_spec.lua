-- The CUDA backend against the CPU: every operator on every size of its case, forward and backward,
-- in f32, bf16 and, where it takes that, f16, twice the same bits, with strided rows, and what it
-- refuses. Runs where a CUDA device is: elsewhere one line says so.
local cases = require("spec.case")
local device = require("spec.device")
local helper = require("spec.helper")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local gpu = device.open("spec/cuda_spec.lua")
if not gpu then
  return
end

-- Bounds on the largest difference over the largest magnitude, against double on the same inputs.
-- f32: the same formulas in another order; a gradient sums products of rounded numbers, whose terms
-- cancel. bf16: one rounding of the result is 2^-9 = 2e-3 of it, a
-- sum of rounded terms a few times that.
local VALUE = { f32 = 1e-5, bf16 = 1e-2, f16 = 1.5e-3 }
local GRADIENT = { f32 = 1e-4, bf16 = 2e-2, f16 = 3e-3 }

-- ---- the specs ----

local function compare(got, want, dtype, bounds, what)
  assert(next(got), "nothing was compared")
  for name, y in pairs(got) do
    local bound = y.dtype == "i32" and 0 or bounds[dtype]
    -- A gradient may be nothing but rounding: that of one key's score is 0, as a difference of two
    -- numbers around 1.
    helper.close(y, want[name], bound, what .. name, 2e-2)
  end
end

local function same(a, b, what)
  for name, y in pairs(a) do
    helper.same(y, b[name], what .. name)
  end
end

local function backward_values(op, want, up, dtype, start)
  local back = op.backward
  local values = {}
  for _, p in ipairs(back.params) do
    local base = p.name:sub(1, 1) == "d" and p.name:sub(2)
    if base and op.tensor[base] and up[base] then
      values[p.name] = up[base]
    elseif base and op.tensor[base] and want[base] and back.tensor[p.name].role == "output" then
      local t = back.tensor[p.name]
      values[p.name] = Tensor.empty(want[base].shape, cases.dtype_of(t, dtype))
        :fill_(t.accumulate and start or 0 / 0)
    elseif not (base and op.tensor[base]) then
      local x = want[p.name]
      values[p.name] = p.tensor and p.tensor.role ~= "input" and x and helper.to(x, x.dtype) or x
    end
  end
  return values
end

local function agree(op, case, shape, dtype, pad)
  local inputs = cases.inputs(op, case, shape, dtype, dtype)
  local exact = cases.inputs(op, case, shape, "f64", dtype)
  local want = cases.forward(op, exact, "f64")
  local got = device.call(op, device.poisoned(op, inputs, dtype), pad)
  compare(got, want, dtype, VALUE, "")
  same(device.call(op, device.poisoned(op, inputs, dtype), pad), got, "again, ")
  if not op.backward then
    return
  end
  local cpu = cases.forward(op, inputs, dtype)
  for name, y in pairs(got) do
    cpu[name] = y
  end
  local up, up_exact = {}, {}
  for name, dy in pairs(cases.upstream(op, want, "f64")) do
    up[name] = helper.to(dy, got[name].dtype)
    up_exact[name] = helper.to(up[name], "f64")
  end
  local names = cases.differentiable(op)
  local wanted = cases.backward(op, want, up_exact, names, "f64", { start = 1 })
  local function run()
    local gradients = {}
    local written = device.call(op.backward, backward_values(op, cpu, up, dtype, 1), pad)
    for _, name in ipairs(names) do
      gradients[name] = written["d" .. name]
    end
    return gradients
  end
  local gradients = run()
  compare(gradients, wanted, dtype, GRADIENT, "d")
  same(run(), gradients, "again, d")
end

describe("the CUDA backend", function()
  for _, op in ipairs(cases.ops()) do
    local case = cases.of(op.name)
    if case then
      for _, dtype in ipairs({ "f32", "bf16", op.takes_f16 and "f16" or nil }) do
        for _, shapes in ipairs({ case.shapes, case.device_shapes or {} }) do
          for _, shape in ipairs(shapes) do
            local size = cases.text(shape)
            it(("%s %s: agrees with the CPU, %s"):format(op.name, dtype, size), function()
              agree(op, case, shape, dtype)
            end)
          end
        end
      end
      it(op.name .. ": reads and writes strided rows", function()
        agree(op, case, case.shapes[#case.shapes], "f32", 8)
        agree(op, case, case.shapes[1], "bf16", 3)
        if op.takes_f16 then
          agree(op, case, case.shapes[#case.shapes], "f16", 3)
        end
      end)
    end
  end

  -- What a call with these inputs raises, at once or at the next wait.
  local function refused(name, inputs, text)
    local op = ops.schema[name]
    helper.raises(function()
      device.call(op, device.poisoned(op, inputs, "f32"))
    end, text)
  end

  local function i32(...)
    return Tensor.from_table({ ... }, "i32")
  end

  local function attention(cu, causal, window, softcap, text)
    local x = helper.normal(1, { 8, 2, 16 })
    refused("attention", { q = x, k = x, v = x, cu_seqlens = cu, scale = 1, causal = causal,
      window = window, softcap = softcap }, text)
  end

  it("reports an id that is out of range at the next wait", function()
    local w = Tensor.from_table({ { 1, 2 }, { 3, 4 } })
    refused("embedding", { w = w, ids = i32(0, 5), padding_idx = -1 },
      "embedding: ids[1] is 5, wanted [0, 2)")
    refused("sample", { z = helper.normal(1, { 1, 5 }), sequence = Tensor.from_table({ 1 }, "i64"),
      position = i32(-2), seed = 1, top_k = 0, top_p = 1, min_p = 0 },
      "sample: position[0] is -2, wanted [0, 2147483648)")
    local cache = helper.normal(1, { 8, 1, 16 })
    refused("attention_decode", { q = helper.normal(2, { 1, 2, 16 }), k_cache = cache,
      v_cache = cache, page = Tensor.from_table({ { 0, 1 } }, "i32"), length = i32(9),
      page_size = 4, scale = 1, window = 0, softcap = 0 },
      "attention_decode: length[0] is 9, wanted [1, 9)")
  end)

  it("names the op whose target or position it reports", function()
    local z = helper.normal(1, { 2, 5 })
    refused("logprob", { logits = z, target = Tensor.from_table({ { 1 }, { 5 } }, "i32"),
      temperature = 1, ignore = -100 }, "logprob: target[1] is 5, wanted [0, 5)")
    refused("ce_tvd", { student = z, teacher = z, target = i32(-1, 0), temperature = 1,
      ignore = -100 }, "ce_tvd: target[0] is -1, wanted [0, 5)")
    refused("linear_logprob", { x = z, w = helper.normal(2, { 7, 5 }), target = i32(7, 0),
      temperature = 1, softcap = 0, ignore = -100, kept = 2 },
      "linear_logprob: target[0] is 7, wanted [0, 7)")
    local angle = helper.normal(3, { 4, 2 })
    refused("qk_norm_rope", { x = helper.normal(4, { 2, 1, 4 }), w = helper.normal(5, { 4 }),
      cos = angle, sin = angle, position = i32(0, 4), eps = 1e-6, offset = 0 },
      "qk_norm_rope: position[1] is 4, wanted [0, 4)")
  end)

  it("reports a wrong number of targets at the next wait, and reads nothing outside", function()
    for _, op in ipairs({ "linear_logprob", "linear_cross_entropy", "linear_distill",
      "linear_distill_topk" }) do
      local function check(target, kept, text)
        local N = target:numel()
        local x, w = helper.normal(1, { N, 5 }), helper.normal(2, { 7, 5 })
        local weight = helper.normal(3, { N })
        refused(op, { x = x, w = w, target = target, temperature = 1, softcap = 0, ignore = -100,
          kept = kept, scale = 1, z_scale = 0, label_smoothing = 0, token_scaling = false,
          teacher_x = x, teacher_w = w, teacher_softcap = 0, divergence = 1, beta = 0.5,
          weight_hard = weight, weight_soft = weight,
          teacher_id = Tensor.from_table({ 1, 4, 2, 5 }, "i32"):narrow(1, 1, N):reshape(N, 1),
          teacher_logp = helper.normal(4, { N, 1 }) }, op .. ": kept is " .. text)
      end
      check(i32(-100, 1, 3), 1, "1, wanted 2, the targets that are not ignored")
      check(i32(-100, 1, 3), 3, "3, wanted 2, the targets that are not ignored")
      check(i32(-100, 1, -100, -100), 3, "3, wanted 1, the targets that are not ignored")
      check(i32(-100, -100), 1, "1, wanted 0, the targets that are not ignored")
      check(i32(0, 6), 1, "1, wanted 2, the targets that are not ignored")
      check(i32(0, 6), 3, "3, wanted [-1, 2]")
      check(i32(0, 6), -2, "-2, wanted [-1, 2]")
    end
  end)

  it("reports sequences that do not rise to the last token at the next wait", function()
    attention(i32(0, 3, 9, 8), true, 0, 0, "attention: cu_seqlens[2] is 9, wanted [3, 9)")
    attention(i32(0, 5, 3, 8), true, 0, 0, "attention: cu_seqlens[2] is 3, wanted [5, 9)")
    attention(i32(1, 8), true, 0, 0, "attention: cu_seqlens[0] is 1, wanted [0, 1)")
    attention(i32(0, 6), true, 0, 0, "attention: cu_seqlens[1] is 6, wanted [8, 9)")
    refused("segment_sum", { x = helper.normal(1, { 8 }), cu_seqlens = i32(0, 5, 3, 8) },
      "segment_sum: cu_seqlens[2] is 3, wanted [5, 9)")
  end)

  it("refuses what the CPU refuses of attention's options", function()
    attention(i32(0, 8), true, -1, 0, "attention: window is -1, wanted 0 or more")
    attention(i32(0, 8), false, 2, 0, "attention: window is 2, wanted 0 where causal is false")
    attention(i32(0, 8), true, 0, -1, "attention: softcap is -1, wanted 0 or more")
  end)
end)
