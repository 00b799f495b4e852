local helper = require("spec.helper")
local orpo = require("liger.loss.orpo")
local preference = require("liger.train.preference")
local Tensor = require("liger.tensor")

-- Pairs { chosen, rejected } of token log-probabilities; the chosen one's prompt tokens third.
local function new_batch(pairs_list, dtype)
  local logp, starts = {}, {}
  for side = 1, 2 do
    for _, pair in ipairs(pairs_list) do
      for _, list in ipairs({ side == 1 and pair[3] or {}, pair[side] }) do
        starts[#starts + 1] = #logp
        for _, x in ipairs(list) do
          logp[#logp + 1] = x
        end
      end
    end
  end
  starts[#starts + 1] = #logp
  return { answer_cu = Tensor.from_table(starts, "i32") }, Tensor.from_table(logp, dtype or "f64")
end

local function softplus(x)
  return math.log(1 + math.exp(x))
end

local PAIRS = {
  { { -0.4, -0.6 }, { -1.5, -0.5, -1 }, { -3, -2 } },
  { { -2 }, { -0.1 }, {} },
  { { -0.2, -0.2 }, { -4 }, { -1 } },
}

describe("ORPO", function()
  it("B27: has finite odds for averages up to 0, in fp32 and from bf16", function()
    for _, dtype in ipairs({ "f64", "f32", "bf16" }) do
      for _, case in ipairs({
        { -0.5, -1, 0.974077, 0.320300 }, { -1e-8, -1, 18.96201, 5.8e-9 }, { 0, -1 }, { -1, 0 },
      }) do
        -- Averages: the number of tokens does not count.
        local a, b = case[1], case[2]
        local batch, logp = new_batch({ { { a, a }, { b, b, b } } }, dtype)
        logp:requires_grad_()
        local loss, values = orpo.loss(batch, logp, orpo.options())
        loss:backward()
        local odds, ratio = values.parts.log_odds_chosen:item(), values.parts.log_odds_ratio:item()
        if case[3] then
          helper.close(odds, case[3], dtype == "bf16" and 1e-2 or 1e-5, dtype)
          helper.close(-ratio, case[4], dtype == "bf16" and 1e-2 or 1e-5, dtype, 1)
        end
        for _, x in ipairs({ odds, ratio, loss:item(), unpack(helper.values(logp.grad)) }) do
          assert.is_true(x - x == 0, dtype)
        end
      end
    end
    helper.close(orpo.log1mexp(Tensor.from_table({ -1e-8 }, "f32")), { -18.42068 }, 1e-6)
  end)

  it("has log(1 - e^x) to the last digits on both sides of its switch", function()
    local list, wanted = {}, {}
    for i, x in ipairs({ 1e-9, 1e-6, 1e-3, 0.1, 0.49999, 0.5, 0.50001, 0.7, 1, 10, 50 }) do
      -- 1 - e^-x = x - x^2/2 + ...: by its series where it is small.
      local series, term = 0, 1
      for k = 1, 30 do
        term = term * -x / k
        series = series - term
      end
      list[i], wanted[i] = -x, x < 2 and math.log(series) or -math.exp(-x) - math.exp(-2 * x) / 2
    end
    local x = Tensor.from_table(list, "f64")
    for i, y in ipairs(orpo.log1mexp(x):to_table()) do
      -- 1e-16 / e^-10 is what double keeps of 1 - e^-10.
      assert.is_true(math.abs(y - wanted[i]) <= 1e-13 * math.max(1, math.abs(wanted[i])), list[i])
    end
    helper.gradients(orpo.log1mexp, { Tensor.from_table({ -0.1, -0.4, -0.6, -3, -20 }, "f64") })
  end)

  it("adds the odds ratio's term to the NLL of prompt and chosen answer", function()
    local batch, logp = new_batch(PAIRS)
    local loss, values = orpo.loss(batch, logp, orpo.options({ beta = 0.3 }))
    local nll, tokens, ratio = 0, 0, 0
    for _, pair in ipairs(PAIRS) do
      local average = {}
      for side = 1, 3 do
        local sum = 0
        for _, x in ipairs(pair[side]) do
          sum = sum + x
          nll, tokens = side ~= 2 and nll - x or nll, side ~= 2 and tokens + 1 or tokens
        end
        average[side] = sum / #pair[side]
      end
      local c, r = average[1], average[2]
      local z = c - r - math.log(1 - math.exp(c)) + math.log(1 - math.exp(r))
      ratio = ratio - softplus(-z) / #PAIRS
    end
    helper.close(values.parts.nll_loss:item(), nll / tokens, 1e-12)
    helper.close(values.parts.log_odds_ratio:item(), ratio, 1e-12)
    helper.close(loss:item(), nll / tokens - 0.3 * ratio, 1e-12)
  end)

  it("has the gradient of central differences", function()
    local batch, logp = new_batch(PAIRS)
    helper.gradients(function(x)
      return (orpo.loss(batch, x, orpo.options({ beta = 0.5 })))
    end, { logp })
  end)

  it("B20: has the same loss in micro-batches of pairs", function()
    local batch, logp = new_batch(PAIRS)
    local whole = preference.metrics(preference.total({
      preference.sums(batch, orpo.loss(batch, logp, orpo.options())),
    }))
    local sums = {}
    for _, list in ipairs({ { PAIRS[1] }, { PAIRS[2], PAIRS[3] } }) do
      local micro, part = new_batch(list)
      micro.total_rows, micro.total_tokens = 3, 8
      preference.total({
        preference.sums(micro, orpo.loss(micro, part, orpo.options())),
      }, sums)
    end
    for name, x in pairs(preference.metrics(sums)) do
      helper.close(x, whole[name], 1e-12, name)
    end
  end)

  it("refuses options out of range", function()
    helper.raises(function()
      orpo.options({ beta = -1 })
    end, "orpo: beta is -1, wanted a number from 0")
    helper.raises(function()
      orpo.options({ lambda = 1 })
    end, "orpo: unknown option lambda")
  end)
end)
