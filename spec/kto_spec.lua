local helper = require("spec.helper")
local kto = require("liger.loss.kto")
local preference = require("liger.train.preference")
local Tensor = require("liger.tensor")

local function sigmoid(x)
  return 1 / (1 + math.exp(-x))
end

-- Answers { logp of each token, reference's sum, label }.
local function new_batch(answers, kl)
  local logp, start, ref, labels = {}, { 0 }, {}, {}
  for s, answer in ipairs(answers) do
    for _, x in ipairs(answer[1]) do
      logp[#logp + 1] = x
    end
    start[s + 1], ref[s], labels[s] = #logp, answer[2], answer[3]
  end
  return {
    completion_cu = Tensor.from_table(start, "i32"), ref_logps = Tensor.from_table(ref, "f64"),
    labels = labels, kl = kl,
  }, Tensor.from_table(logp, "f64")
end

local ANSWERS = {
  { { -1, -0.5 }, -2.5, true }, { { -2 }, -1.2, false }, { { -0.7, -0.9, -1.4 }, -2.6, false },
}

describe("KTO", function()
  it("B28: is defined with one class and without rows for the KL, never negative", function()
    local one = { { { -1 }, -3, true } }
    local function loss(kl)
      local batch, logp = new_batch(one, kl)
      return kto.loss(batch, logp, kto.options()):item()
    end
    assert.equal(0, kto.kl(0, 0))
    helper.close(loss(kto.kl(0, 0)), 0.450166, 1e-6)
    helper.close(loss(kto.kl(1, 2)), 0.462570, 1e-6)
    assert.equal(0, kto.kl(-1.4, 2))
    local batch, logp = new_batch(one, 0)
    local metrics = preference.metrics(preference.total({
      preference.sums(batch, kto.loss(batch, logp, kto.options())),
    }))
    assert.is_nil(metrics["rewards/rejected"])
    assert.is_nil(metrics["rewards/margins"])
    helper.close(metrics["rewards/chosen"], 0.2)
  end)

  it("weighs the classes, and keeps the mean over all answers", function()
    local batch, logp = new_batch(ANSWERS, 0.3)
    local o = { beta = 0.5, desirable_weight = 1.5, undesirable_weight = 0.5 }
    local wanted = (1.5 * (1 - sigmoid(0.5 * (1 - 0.3))) + 0.5 * (1 - sigmoid(0.5 * (0.3 + 0.8)))
      + 0.5 * (1 - sigmoid(0.5 * (0.3 + 0.4)))) / 3
    helper.close(kto.loss(batch, logp, kto.options(o)):item(), wanted, 1e-12)
    o.loss_type = "apo_zero_unpaired"
    wanted = (1.5 * (1 - sigmoid(0.5)) + 0.5 * sigmoid(-0.4) + 0.5 * sigmoid(-0.2)) / 3
    helper.close(kto.loss(batch, logp, kto.options(o)):item(), wanted, 1e-12)
  end)

  it("has the gradient of central differences", function()
    for _, name in ipairs({ "kto", "apo_zero_unpaired" }) do
      local batch, logp = new_batch(ANSWERS, 0.2)
      helper.gradients(function(x)
        return (kto.loss(batch, x, kto.options({ loss_type = name, undesirable_weight = 2 })))
      end, { logp })
    end
  end)

  it("B20: has the same loss in micro-batches", function()
    local batch, logp = new_batch(ANSWERS, 0.2)
    local whole, sums = kto.loss(batch, logp, kto.options()):item(), {}
    for _, list in ipairs({ { ANSWERS[1], ANSWERS[2] }, { ANSWERS[3] } }) do
      local micro, part = new_batch(list, 0.2)
      micro.total_rows = 3
      preference.total({
        preference.sums(micro, kto.loss(micro, part, kto.options())),
      }, sums)
    end
    helper.close(preference.metrics(sums).loss, whole, 1e-12)
  end)

  it("asks for its reference and its KL, and refuses options out of range", function()
    local batch, logp = new_batch(ANSWERS)
    helper.raises(function()
      kto.loss(batch, logp, kto.options())
    end, "kto: the batch has no kl")
    batch.ref_logps, batch.kl = nil, 0
    helper.raises(function()
      kto.loss(batch, logp, kto.options())
    end, "kto: the batch has no ref_logps")
    for text, o in pairs({
      ["kto: unknown option weight"] = { weight = 1 },
      ["kto: loss_type is bco, wanted one of kto, apo_zero_unpaired"] = { loss_type = "bco" },
      ["kto: beta is 0, wanted a number above 0"] = { beta = 0 },
      ["kto: desirable_weight is -1, wanted a number from 0"] = { desirable_weight = -1 },
      ["kto: undesirable_weight is -1, wanted a number from 0"] = { undesirable_weight = -1 },
    }) do
      helper.raises(function()
        kto.options(o)
      end, text)
    end
  end)
end)
