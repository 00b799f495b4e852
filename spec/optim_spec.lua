local ffi = require("ffi")
local helper = require("spec.helper")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local optim = require("liger.optim")
local Tensor = require("liger.tensor")

local function parameter(name, tensor, grad)
  tensor:requires_grad_()
  tensor.grad = grad
  return { name = name, tensor = tensor }
end

local function set_grad(p, grad)
  p.tensor.grad = helper.to(grad, "f32")
end

-- Every parameter, moment and low half as new tensors.
local function snapshot(optimizer)
  local copies = {}
  for _, s in ipairs(optimizer.states) do
    for _, t in ipairs({ s.tensor, s.m, s.v, s.low or s.m }) do
      copies[#copies + 1] = helper.to(t, t.dtype)
    end
  end
  return copies
end

local function unchanged(before, optimizer)
  for i, now in ipairs(snapshot(optimizer)) do
    helper.same(now, before[i])
  end
end

-- Normal numbers as helper.normal gives, on devices without f64 too.
local function normal(stream, shape, dtype)
  local y = Tensor.empty(shape, "f32")
  ops.random_normal(20, stream, 0, 1, y)
  return helper.to(y, dtype or "f32")
end

-- The bits of a tensor's elements, from 1.
local function bits(t)
  local kind = t.dtype == "bf16" and "uint16_t *" or "uint32_t *"
  local data, list = ffi.cast(kind, t:read()), {}
  for i = 1, t:numel() do
    list[i] = tonumber(data[i - 1])
  end
  return list
end

-- The bits of the fp32 weights that a bf16 tensor and its low half hold.
local function joined(p, low)
  local a, b = bits(p), bits(low)
  for i = 1, #a do
    a[i] = (a[i] * 65536 + (b[i] < 32768 and b[i] or b[i] - 65536)) % 2 ^ 32
  end
  return a
end

-- The share of places where two lists agree.
local function agreement(a, b)
  local same = 0
  for i = 1, #a do
    same = same + (a[i] == b[i] and 1 or 0)
  end
  return same / #a
end

local function about_half(share, what)
  assert.is_true(math.abs(share - 0.5) < 0.01, ("%s: %g"):format(what, share))
end

describe("adamw", function()
  it("B85: decays matrices, not norms and biases", function()
    local names = {
      "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias",
      "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight",
      "model.norm.weight", "ln_f.weight",
    }
    local parameters = {}
    for i, name in ipairs(names) do
      local shape = i == 1 and { 2, 3 } or { 3 }
      parameters[i] = parameter(name, fn.full(2, unpack(shape)), fn.zeros(unpack(shape)))
    end
    optim.adamw(parameters, { lr = 0.1, weight_decay = 0.5 }):step()
    helper.close(parameters[1].tensor, { 1.9, 1.9, 1.9, 1.9, 1.9, 1.9 }, 1e-6)
    for i = 2, #parameters do
      helper.close(parameters[i].tensor, { 2, 2, 2 }, 0, names[i])
    end
    -- By name too, whatever the shape.
    local odd = {}
    for i, name in ipairs({ "a.input_layernorm.weight", "ln_f.weight", "q_proj.bias" }) do
      odd[i] = parameter(name, fn.full(2, 2, 2), fn.zeros(2, 2))
    end
    optim.adamw(odd, { lr = 0.1, weight_decay = 0.5 }):step()
    for i = 1, #odd do
      helper.close(odd[i].tensor, { 2, 2, 2, 2 }, 0)
    end
  end)

  it("B86: adds epsilon after the corrections of both moments", function()
    for _, case in ipairs({ { 0.01, -5e-4 }, { 0, -1e-3 } }) do
      local p = parameter("w", fn.zeros(1, "f64"), fn.full(0.01, 1, "f64"))
      optim.adamw({ p }, { lr = 1e-3, eps = case[1], max_grad_norm = 0 }):step()
      helper.close(p.tensor:to_table()[1] / case[2], 1, 1e-12)
    end
  end)

  it("B95: skips a step whose norm is not finite; weights and moments keep their bits", function()
    for _, bad in ipairs({ math.huge, -math.huge, 0 / 0 }) do
      for _, dtype in ipairs({ "f32", "bf16" }) do
        local parameters = {}
        for i = 1, 3 do
          local weight, grad = helper.normal(i, { 4, 5 }, dtype), helper.normal(10 + i, { 4, 5 })
          parameters[i] = parameter("w" .. i, weight, grad)
        end
        local optimizer = optim.adamw(parameters, { lr = 0.1, weight_decay = 0.1 })
        assert.is_true(select(2, optimizer:step()))
        local before = snapshot(optimizer)
        for i = 1, 3 do
          set_grad(parameters[i], helper.normal(20 + i, { 4, 5 }))
        end
        parameters[2].tensor.grad:data()[7] = bad
        local norm, updated = optimizer:step()
        assert.is_false(updated)
        assert.is_false(norm < math.huge)
        unchanged(before, optimizer)
        assert.is_true(parameters[2].tensor.grad_failed)
        assert.is_nil(parameters[1].tensor.grad_failed or parameters[3].tensor.grad_failed)
        assert.equal(1, optimizer.steps)
        -- The bad gradient is gone, the next step is a good one.
        set_grad(parameters[1], helper.normal(31, { 4, 5 }))
        assert.is_true(select(2, optimizer:step()))
        assert.is_nil(parameters[2].tensor.grad_failed)
        assert.equal(2, optimizer.steps)
        assert.is_false(helper.is_same(helper.to(parameters[1].tensor, dtype), before[1]))
      end
    end
  end)

  it("B95: clips 100 gradients of 1e20 to 0.1 each", function()
    local parameters = {}
    for i = 1, 100 do
      parameters[i] = parameter("w" .. i, fn.zeros(1), fn.full(1e20, 1))
    end
    local gradients = {}
    for i, p in ipairs(parameters) do
      gradients[i] = p.tensor.grad
    end
    local norm = optim.clip.global_norm(gradients)
    helper.close(norm / 1e21, 1, 1e-6)
    helper.close(1e20 * optim.clip.factor(norm, 1), 0.1, 1e-6)
    local optimizer = optim.adamw(parameters, { max_grad_norm = 1, beta1 = 0.5 })
    local _, updated = optimizer:step()
    assert.is_true(updated)
    helper.close(optimizer.states[1].m, { 0.05 }, 1e-6)
    helper.close(optimizer.states[100].m, { 0.05 }, 1e-6)
  end)

  it("B95: leaves all alone when every gradient is 0", function()
    local p = parameter("w", helper.normal(1, { 3 }), fn.zeros(3))
    local before = helper.to(p.tensor, "f32")
    local norm, updated = optim.adamw({ p }):step()
    assert.equal(0, norm)
    assert.is_true(updated)
    helper.same(helper.to(p.tensor, "f32"), before)
  end)

  it("passes over parameters without a gradient", function()
    local idle, busy = parameter("a", fn.ones(2, 2)), parameter("b", fn.ones(2, 2), fn.ones(2, 2))
    optim.adamw({ idle, busy }, { lr = 0.1, weight_decay = 0.5 }):step()
    helper.close(idle.tensor, { 1, 1, 1, 1 }, 0)
    assert.is_true(busy.tensor:to_table()[1][1] < 1)
  end)

  it("keeps what bf16 weights lack of fp32 ones, so that small updates add up", function()
    local p = parameter("w", fn.ones(4, "bf16"))
    local optimizer = optim.adamw({ p }, { lr = 1e-3, beta1 = 0, beta2 = 0, max_grad_norm = 0 })
    for _ = 1, 20 do
      set_grad(p, fn.ones(4))
      optimizer:step()
    end
    -- An update of 0.001 is below half a step of bf16 at 1.
    helper.close(p.tensor, { 0.98, 0.98, 0.98, 0.98 }, 2 ^ -8)
    local word = ffi.new("uint32_t[1]", joined(p.tensor, optimizer.states[1].low)[1])
    helper.close(tonumber(ffi.cast("float *", word)[0]), 0.98, 1e-5)
  end)

  it("moves bf16 weights as fp32 ones, bit for bit", function()
    local start = normal(1, { 37, 29 }, "bf16")
    local short, long = parameter("w", start), parameter("w", helper.to(start, "f32"))
    local options = { lr = 1e-3, weight_decay = 0.1 }
    local a, b = optim.adamw({ short }, options), optim.adamw({ long }, options)
    for step = 1, 100 do
      local grad = normal(100 + step, { 37, 29 })
      set_grad(short, grad)
      set_grad(long, grad)
      a:step()
      b:step()
    end
    local wanted = bits(long.tensor)
    assert.same(wanted, joined(short.tensor, a.states[1].low))
    helper.same(a.states[1].v, b.states[1].v)
    -- What a model reads is the nearest bf16, halves away from 0.
    for i, word in ipairs(bits(short.tensor)) do
      assert.equal(math.floor((wanted[i] + 32768) / 65536), word)
    end
  end)

  it("keeps a NaN one, and halves exact, in the low bits", function()
    local p = helper.to(Tensor.from_table({ 1, 1, -1, 1 }), "bf16")
    local low, m, v = fn.zeros(4, "bf16"), fn.zeros(4), fn.zeros(4)
    -- 1 + 2^-8 and 1 - 2^-9 lie half-way between neighbours.
    local g = Tensor.from_table({ -1, 1, 1, 0 / 0 })
    ops.adamw(g, 1, 2 ^ -8, 0, 0, 0, 0, 1, p, m, v, low)
    helper.close(p, { 1 + 2 ^ -7, 1 - 2 ^ -8, -1 - 2 ^ -7, 0 / 0 }, 0)
    local words = joined(p, low)
    assert.same({ 0x3f808000, 0x3f7f0000, 0xbf808000 }, { words[1], words[2], words[3] })
  end)

  it("refuses low bits beside weights that are not bf16", function()
    local p = fn.ones(2)
    helper.raises(function()
      ops.adamw(fn.ones(2), 1, 0.1, 0, 0, 1, 0, 1, p, fn.zeros(2), fn.zeros(2), fn.zeros(2))
    end, "adamw: p is f32, wanted bf16 beside low")
  end)

  it("keeps f64 moments for f64 weights", function()
    local p = parameter("w", fn.ones(4, "f64"), fn.ones(4, "f64"))
    local optimizer = optim.adamw({ p })
    assert.equal("f64", optimizer.states[1].m.dtype)
    assert.is_nil(optimizer.states[1].low)
  end)

  it("forgets gradients when asked", function()
    local p = parameter("w", fn.ones(2), fn.ones(2))
    optim.adamw({ p, parameter("idle", fn.ones(1)) }):zero_grad()
    helper.close(p.tensor.grad, { 0, 0 }, 0)
  end)

  it("refuses unknown options and values out of range", function()
    local function refused(options, ...)
      helper.raises(function()
        optim.adamw({}, options)
      end, ...)
    end
    refused({ learning_rate = 1 }, "adamw: unknown option learning_rate")
    refused({ lr = -1 }, "adamw: lr is -1, wanted a number from 0")
    refused({ lr = "1e-4" }, "adamw: lr is 1e-4")
    refused({ lr = 0 / 0 }, "adamw: lr is")
    refused({ lr = math.huge }, "adamw: lr is inf")
    refused({ beta1 = 1 }, "adamw: beta1 is 1, wanted a number from 0 to below 1")
    refused({ beta2 = 1 }, "adamw: beta2 is 1")
    refused({ beta2 = -0.1 }, "adamw: beta2 is -0.1")
    refused({ eps = -1 }, "adamw: eps is -1")
    refused({ weight_decay = -1 }, "adamw: weight_decay is -1")
    refused({ max_grad_norm = -1 }, "adamw: max_grad_norm is -1")
    refused({ states = "f16" }, "adamw: states is f16, wanted f32 or bf16")
    refused({ seed = 1.5 }, "adamw: seed is 1.5, wanted a whole number")
    refused({ seed = "x" }, "adamw: seed is x, wanted a whole number")
    helper.raises(function()
      optim.adamw({
        parameter("a", fn.ones(1, "bf16")), parameter("proj.weight", fn.ones(1)),
      }, { states = "bf16" })
    end, "adamw: states is bf16, but proj.weight is f32: wanted bf16 parameters")
  end)
end)

describe("adamw with bf16 states", function()
  local N = 65536

  -- Two tensors of ones after `steps` steps to 1 + 2^-8, half-way, each from 1 again; their first
  -- moments lie half-way too. Gives the optimiser and, by tensor, which weights and moments went
  -- up.
  local function run(seed, steps)
    local parameters = { parameter("a", fn.ones(256, 256, "bf16")) }
    parameters[2] = parameter("b", fn.ones(256, 256, "bf16"))
    local optimizer = optim.adamw(parameters, {
      lr = 2 ^ -8, beta1 = 0, beta2 = 0, eps = 0, max_grad_norm = 0, states = "bf16", seed = seed,
    })
    for _ = 1, steps do
      for _, p in ipairs(parameters) do
        p.tensor:fill_(1)
        p.tensor.grad = fn.full(-1 - 2 ^ -8, 256, 256)
      end
      optimizer:step()
    end
    local up = {}
    for i, s in ipairs(optimizer.states) do
      up[i] = { p = {}, m = {} }
      for k, word in ipairs(bits(s.tensor)) do
        assert.is_true(word == 0x3f80 or word == 0x3f81)
        up[i].p[k] = word - 0x3f80
      end
      for k, word in ipairs(bits(s.m)) do
        assert.is_true(word == 0xbf80 or word == 0xbf81)
        up[i].m[k] = word - 0xbf80
      end
    end
    return optimizer, up
  end

  local function share(list)
    local total = 0
    for _, x in ipairs(list) do
      total = total + x
    end
    return total / #list
  end

  it("B88: rounds each value of each tensor, step and moment by bits of its own", function()
    local optimizer, up = run(3, 1)
    for i = 1, 2 do
      about_half(share(up[i].p), "weights rounded up")
      about_half(share(up[i].m), "moments rounded up")
      about_half(agreement(up[i].p, up[i].m), "weights and moments")
      local above, below = {}, {}
      for k = 1, N - 256 do
        above[k], below[k] = up[i].p[k], up[i].p[k + 256]
      end
      about_half(agreement(above, below), "rows")
    end
    about_half(agreement(up[1].p, up[2].p), "tensors")
    local _, again = run(3, 1)
    assert.equal(1, agreement(up[1].p, again[1].p))
    assert.equal(1, agreement(up[2].m, again[2].m))
    local _, later = run(3, 2)
    about_half(agreement(up[1].p, later[1].p), "steps")
    about_half(agreement(up[1].p, later[2].p), "steps of two tensors")
    local _, other = run(4, 1)
    about_half(agreement(up[1].p, other[1].p), "seeds")
    assert.equal("bf16", optimizer.states[1].v.dtype)
    assert.is_nil(optimizer.states[1].low)
  end)

  it("rounds by the words of its Philox stream", function()
    local n, seed, stream = 1001, 99, 5
    local words = ffi.new("uint32_t[?]", 2 * n)
    lib.C.lg_philox(seed, stream, 0, 2 * n, words)
    local function rounded(value, random)
      local x = ffi.new("float[1]", value)
      local whole = tonumber(ffi.cast("uint32_t *", x)[0])
      return math.floor((whole + random) / 65536)
    end
    local g = normal(7, { n })
    local p, m, v = normal(8, { n }, "bf16"), fn.zeros(n, "bf16"), fn.zeros(n, "bf16")
    local before = helper.values(p)
    -- Without memory the moments are g and g^2; without a gradient decay alone moves the weights.
    ops.adamw_stochastic(g, 1, 0, 0, 0, 1, 0, 1, seed, stream, p:clone(), m, v)
    local first, second = bits(m), bits(v)
    ops.adamw_stochastic(fn.zeros(n), 1, 2 ^ -5, 0, 0, 1, 2 ^ -6, 1, seed, stream, p, m, v)
    local weights = bits(p)
    for i, x in ipairs(helper.values(g)) do
      local a, b = tonumber(words[2 * i - 2]), tonumber(words[2 * i - 1])
      assert.equal(rounded(x, math.floor(a / 65536)), first[i])
      assert.equal(rounded(x * x, b % 65536), second[i])
      assert.equal(rounded(before[i] * (1 - 2 ^ -11), a % 65536), weights[i])
    end
  end)

  it("adds up updates far below half a step", function()
    local p = parameter("w", fn.ones(N, "bf16"))
    local optimizer = optim.adamw({ p }, {
      lr = 2 ^ -14, beta1 = 0, beta2 = 0, max_grad_norm = 0, states = "bf16",
    })
    for _ = 1, 16 do
      set_grad(p, fn.full(-1, N))
      optimizer:step()
    end
    helper.close(fn.sum(helper.to(p.tensor, "f32")):item() / N, 1 + 2 ^ -10, 5e-5)
  end)

  it("makes no number of what is not finite", function()
    local p = helper.to(Tensor.from_table({ 1 / 0, -1 / 0, 0 / 0 }), "bf16")
    ops.adamw_stochastic(fn.zeros(3), 1, 0, 0, 0, 1, 0, 1, 0, 0, p, fn.zeros(3, "bf16"),
      fn.zeros(3, "bf16"))
    for _, x in ipairs(helper.values(p)) do
      assert.is_false(math.abs(x) < math.huge)
    end
  end)

  it("refuses attributes out of range", function()
    local function refused(beta1, beta2, step, ...)
      local p = fn.ones(1, "bf16")
      helper.raises(function()
        ops.adamw_stochastic(fn.ones(1), 1, 0, beta1, beta2, 1, 0, step, 0, 0, p, p:clone(),
          p:clone())
      end, ...)
    end
    refused(1, 0, 1, "adamw_stochastic: beta1 is 1, wanted [0, 1)")
    refused(0, -1, 1, "adamw_stochastic: beta2 is -1, wanted [0, 1)")
    refused(0, 0, 0, "adamw_stochastic: step is 0, wanted at least 1")
  end)
end)

describe("clipping", function()
  it("is off at 0", function()
    assert.equal(1, optim.clip.factor(1e9, 0))
  end)

  it("B95: refuses a negative norm, and one that is no number", function()
    for _, bad in ipairs({ -1, 0 / 0 }) do
      helper.raises(function()
        optim.clip.factor(1, bad)
      end, "clip: max_grad_norm is", "wanted 0 (off) or more")
    end
  end)
end)

describe("a schedule", function()
  it("B90: linear falls by one tenth a step over ten steps", function()
    for _, warmup in ipairs({ 0, 2 }) do
      local rate = optim.schedule("linear", { lr = 1e-5, steps = 10, warmup = warmup })
      -- The rate of a step is a function of its number alone: a resumed run goes on where the
      -- straight one is.
      local again = optim.schedule("linear", { lr = 1e-5, steps = 10, warmup = warmup })
      for k = 6, 10 do
        assert.equal(rate(k - 1), again(k - 1))
      end
      if warmup == 0 then
        for k = 1, 10 do
          helper.close(rate(k - 1) / (1e-5 * (11 - k) / 10), 1, 1e-12)
        end
      end
    end
  end)

  it("takes a warm-up below 1 as a share of the steps", function()
    local rate = optim.schedule("constant", { lr = 1, steps = 30, warmup = 0.1 })
    helper.close({ rate(0), rate(1), rate(2), rate(3) }, { 0, 1 / 3, 2 / 3, 1 }, 1e-12)
  end)

  it("stays finite at the odd ends", function()
    for _, name in ipairs({
      "constant", "linear", "cosine", "inverse_sqrt", "polynomial", "wsd",
    }) do
      for _, options in ipairs({
        { steps = 1 }, { steps = 5, warmup = 5 }, { steps = 5, lr = 0 }, { steps = 3, warmup = 9 },
      }) do
        local rate = optim.schedule(name, options)
        for step = 0, 12 do
          local lr = rate(step)
          assert.is_true(lr >= 0 and lr < 1, name .. " at " .. step)
        end
      end
    end
  end)

  it("falls like a line, a cosine or a root", function()
    local function middle(decay_type)
      return optim.schedule("wsd", {
        lr = 1, steps = 8, decay_steps = 8, decay_type = decay_type,
      })(2)
    end
    helper.close(middle("linear"), 0.75, 1e-12)
    helper.close(middle("cosine"), 0.5 * (1 + math.cos(math.pi / 4)), 1e-12)
    helper.close(middle("1-sqrt"), 0.5, 1e-12)
  end)

  it("refuses what it does not know", function()
    local function refused(name, options, ...)
      helper.raises(function()
        optim.schedule(name, options)
      end, ...)
    end
    refused("triangle", {}, "schedule: name is triangle, wanted constant, linear")
    refused("linear", { num_steps = 3 }, "schedule: unknown option num_steps")
    refused("linear", { lr = -1 }, "schedule: lr is -1, wanted a number from 0")
    refused("linear", { lr = "1" }, "schedule: lr is 1, wanted a number")
    refused("linear", { steps = -1 }, "schedule: steps is -1, wanted a number from 0")
    refused("linear", { warmup = -1 }, "schedule: warmup is -1")
    refused("wsd", {
      decay_type = "exp",
    }, "schedule: decay_type is exp, wanted cosine, linear or 1-sqrt")
    refused("wsd", { stable_steps = "x" }, "schedule: stable_steps is x")
  end)
end)

describe("the memory of an optimiser", function()
  it("counts as its own", function()
    local memory = require("liger.memory")
    local before = memory.by_owner().optimiser or 0
    local weight = Tensor.empty({ 64, 64 }, "f32"):fill_(1)
    local optimizer = optim.adamw({ { name = "w.weight", tensor = weight } }, {})
    assert.equal(2 * 64 * 64 * 4, memory.by_owner().optimiser - before)
    assert.equal(0, optimizer.steps)
  end)
end)
