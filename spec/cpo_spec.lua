local helper = require("spec.helper")
local cpo = require("liger.loss.cpo")
local preference = require("liger.train.preference")
local Tensor = require("liger.tensor")

local function new_batch(pairs_list, dtype)
  local logp, start = {}, { 0 }
  for side = 1, 2 do
    for _, pair in ipairs(pairs_list) do
      for _, x in ipairs(pair[side]) do
        logp[#logp + 1] = x
      end
      start[#start + 1] = #logp
    end
  end
  return { completion_cu = Tensor.from_table(start, "i32") },
    Tensor.from_table(logp, dtype or "f64")
end

local function value(pairs_list, o)
  local batch, logp = new_batch(pairs_list)
  return cpo.loss(batch, logp, cpo.options(o)):item()
end

local function softplus(x)
  return math.log(1 + math.exp(x))
end

local PAIRS = { { { -1, -2, -1 }, { -3, -0.5 } }, { { -0.4 }, { -0.2, -0.3, -0.1 } } }

describe("CPO", function()
  it("B26: sums log-probabilities, and averages them over the answer's tokens in SimPO", function()
    local pair = { { { -1, -3, -2, -2 }, { -2, -4 } } }
    helper.close(value(pair, { loss_type = "simpo", beta = 2, simpo_gamma = 1, cpo_alpha = 0 }),
      0.313262, 1e-6)
    helper.close(value(pair, { beta = 0.1, cpo_alpha = 0 }), 0.798139, 1e-6)
  end)

  it("has each loss's formula", function()
    local c, r = { -4, -0.4 }, { -3.5, -0.6 }
    local mc, mr = { -4 / 3, -0.4 }, { -1.75, -0.2 }
    local function mean(f)
      return (f(1) + f(2)) / 2
    end
    local B, e, nll = 0.6, 0.2, 4.4 / 4
    helper.close(value(PAIRS, { beta = B, label_smoothing = e }), mean(function(i)
      local x = B * (c[i] - r[i])
      return (1 - e) * softplus(-x) + e * softplus(x)
    end) + nll, 1e-12)
    helper.close(value(PAIRS, { loss_type = "hinge", beta = B, cpo_alpha = 0.5 }), mean(function(i)
      return math.max(0, 1 - B * (c[i] - r[i]))
    end) + nll / 2, 1e-12)
    helper.close(value(PAIRS, { loss_type = "ipo", beta = B, cpo_alpha = 0 }), mean(function(i)
      return (mc[i] - mr[i] - 1 / (2 * B)) ^ 2
    end), 1e-12)
    local function alpha_po(x)
      return (1 - math.exp(-0.25 * x)) / 0.25
    end
    helper.close(value(PAIRS, {
      loss_type = "simpo", beta = B, cpo_alpha = 0, simpo_gamma = 0.3, alpha = 0.25,
      label_smoothing = e,
    }), mean(function(i)
      local x = B * (alpha_po(mc[i]) - alpha_po(mr[i])) - 0.3
      return (1 - e) * softplus(-x) + e * softplus(x)
    end), 1e-12)
  end)

  it("has the gradient of central differences", function()
    for _, o in ipairs({
      {}, { loss_type = "hinge" }, { loss_type = "ipo", beta = 1 }, { label_smoothing = 0.3 },
      { loss_type = "simpo", beta = 2 }, { loss_type = "simpo", beta = 2, alpha = -0.3 },
    }) do
      local batch, logp = new_batch(PAIRS)
      helper.gradients(function(x)
        return (cpo.loss(batch, x, cpo.options(o)))
      end, { logp })
    end
  end)

  it("stays finite where AlphaPO's exponential would overflow", function()
    local batch, logp = new_batch({ { { -900 }, { -1 } } }, "f32")
    local loss = cpo.loss(batch, logp:requires_grad_(), cpo.options({
      loss_type = "simpo", alpha = 0.5, cpo_alpha = 0,
    }))
    loss:backward()
    for _, x in ipairs({ loss:item(), unpack(logp.grad:to_table()) }) do
      assert.is_true(x - x == 0)
    end
  end)

  it("B20: has the same loss in micro-batches of pairs", function()
    local batch, logp = new_batch(PAIRS)
    local whole = preference.metrics(preference.total({
      preference.sums(batch, cpo.loss(batch, logp, cpo.options())),
    }))
    local sums = {}
    for _, pair in ipairs(PAIRS) do
      local micro, part = new_batch({ pair })
      micro.total_rows, micro.total_tokens = 2, 4
      preference.total({
        preference.sums(micro, cpo.loss(micro, part, cpo.options())),
      }, sums)
    end
    for name, x in pairs(preference.metrics(sums)) do
      helper.close(x, whole[name], 1e-12, name)
    end
  end)

  it("refuses options out of range", function()
    for text, o in pairs({
      ["cpo: unknown option gamma"] = { gamma = 1 },
      ["cpo: loss_type is kto, wanted one of sigmoid, hinge, ipo, simpo"] = { loss_type = "kto" },
      ["cpo: beta is 0, wanted a number above 0"] = { beta = 0 },
      ["cpo: cpo_alpha is -1, wanted a number from 0"] = { cpo_alpha = -1 },
    }) do
      helper.raises(function()
        cpo.options(o)
      end, text)
    end
  end)
end)
