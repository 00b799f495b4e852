local helper = require("spec.helper")
local cjson = require("cjson")
local ops = require("liger.ops")
local rope = require("liger.nn.rope")
local Tensor = require("liger.tensor")

local GOLDEN = helper.golden_folder("losses/layers/rope_table-")
local LLAMA3 = {
  factor = 32, low_freq_factor = 1, high_freq_factor = 4, original_max_position_embeddings = 8192,
}

local function with(table, extra)
  local y = {}
  for _, from in ipairs({ table, extra or {} }) do
    for key, value in pairs(from) do
      y[key] = value
    end
  end
  return y
end

-- Row `position` of cos and sin of angles.
local function angles_of(settings, position, length)
  local cos, sin = rope.tables(settings, length or position + 1, "f64")
  local angles = {}
  for i = 1, #rope.frequencies(settings, length) do
    local y, x = sin:to_table()[position + 1][i], cos:to_table()[position + 1][i]
    angles[i] = math.atan2(y, x) % (2 * math.pi)
  end
  return angles
end

describe("rope frequencies", function()
  it("B49: of llama3 keep short wavelengths, divide long ones, interpolate between", function()
    local plain = rope.frequencies(rope.from_config({ rope_theta = 5e5 }, 64))
    for _, spelled in ipairs({ "rope_type", "type" }) do
      local config = { rope_theta = 5e5, rope_scaling = with(LLAMA3, { [spelled] = "llama3" }) }
      local scaled = rope.frequencies(rope.from_config(config, 64))
      local ratio = {}
      for i = 1, 32 do
        ratio[i] = scaled[i] / plain[i]
      end
      for i = 0, 14 do
        assert.equal(1, ratio[i + 1])
      end
      helper.close({ ratio[16], ratio[17], ratio[18] }, { 0.605573, 0.303743, 0.103448 }, 2e-6)
      for i = 18, 31 do
        helper.close(ratio[i + 1], 1 / 32, 1e-12)
      end
      helper.close(scaled[17] / 4.295568e-4, 1, 1e-6)
      helper.raises(function()
        rope.from_config({ rope_scaling = with(LLAMA3, { [spelled] = "llama4" }) }, 64)
      end, "rope type is llama4")
    end
  end)

  it("B50: linear divides by the factor, dynamic changes nothing below its length", function()
    local function at_8(scaling)
      return angles_of(rope.from_config({ rope_theta = 1e4, rope_scaling = scaling }, 4), 8)
    end
    helper.close(at_8(nil), { 8 % (2 * math.pi), 0.08 })
    helper.close(at_8({ rope_type = "linear", factor = 4 }), { 2, 0.02 })
    helper.close(at_8({ rope_type = "dynamic", factor = 4 }), { 8 % (2 * math.pi), 0.08 })
  end)

  it("of the dynamic type are those of each length, also after a longer sequence", function()
    local config = {
      rope_theta = 1e4, max_position_embeddings = 16,
      rope_scaling = { type = "dynamic", factor = 2 },
    }
    local settings = rope.from_config(config, 8)
    local short = angles_of(settings, 5, 10)
    local long = angles_of(settings, 5, 40)
    local longer = angles_of(settings, 5, 50)
    assert.is_true(long[2] < short[2] and longer[2] < long[2])
    helper.close(angles_of(settings, 5, 40), long, 0)
    helper.close(angles_of(settings, 5, 16), short, 0)
    local fresh = rope.from_config(config, 8)
    helper.close(angles_of(fresh, 5, 40), long, 0)
  end)

  it("of yarn are those of a small head, with its magnitudes and its ramp", function()
    local function of(changes)
      local scaling = with({
        rope_type = "yarn", factor = 4, original_max_position_embeddings = 64,
      }, changes)
      return rope.frequencies(rope.from_config({
        rope_theta = 1e4, rope_scaling = scaling, max_position_embeddings = 256,
      }, 8))
    end
    -- A column would turn 32 times at -0.5 and once at 1.008, which is cut to 0 and 2: columns 0, 1
    -- and 2 keep all, half and none of theirs.
    local freq, factor = of()
    helper.close(freq, { 1, 0.1 * (1 + 1 / 4) / 2, 0.01 / 4, 0.001 / 4 }, 1e-12)
    helper.close(factor, 0.1 * math.log(4) + 1, 1e-12)
    -- Not cut, the ramp ends at 8 log(64 / 2 pi) / (2 log 1e4).
    local high = 8 * math.log(64 / (2 * math.pi)) / (2 * math.log(1e4))
    local share = 1 - 1 / high
    helper.close((of({ truncate = false }))[2], 0.1 * (share + (1 - share) / 4), 1e-12)
    local function factor_of(changes)
      return (select(2, of(changes)))
    end
    assert.equal(1, factor_of({ mscale = 1, mscale_all_dim = 1 }))
    helper.close(factor_of({ mscale = 0.5, mscale_all_dim = 1 }),
      (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1), 1e-12)
    assert.equal(factor, factor_of({ mscale = 1, mscale_all_dim = 0 }))
    assert.equal(1.25, factor_of({ attention_factor = 1.25 }))
  end)

  it("of longrope keep a table for short sequences and one for long ones", function()
    local settings = rope.from_config({
      max_position_embeddings = 64, original_max_position_embeddings = 16,
      rope_scaling = { type = "longrope", short_factor = { 1, 1 }, long_factor = { 2, 4 } },
    }, 4)
    local factor = math.sqrt(1 + math.log(4) / math.log(16))
    local function row(length)
      return rope.tables(settings, length, "f64"):to_table()[4]
    end
    helper.close(row(16), { math.cos(3) * factor, math.cos(0.03) * factor }, 1e-12)
    helper.close(row(17), { math.cos(1.5) * factor, math.cos(0.0075) * factor }, 1e-12)
    helper.close(row(9), { math.cos(3) * factor, math.cos(0.03) * factor }, 1e-12)
    assert.equal((rope.tables(settings, 20, "f64")), (rope.tables(settings, 40, "f64")))
  end)

  it("B54: are turned into angles in double, so that positions past 256 stay apart", function()
    local settings = rope.from_config({}, 4)
    local cos = rope.tables(settings, 258, "f32")
    helper.close(cos:to_table()[258][1], 0.819306, 1e-6)
    helper.close(cos:to_table()[257][1], -0.039791, 1e-6)
    local config = {
      model_type = "qwen3", vocab_size = 8, hidden_size = 4, num_hidden_layers = 1,
      num_attention_heads = 1,
      intermediate_size = 4, head_dim = 4,
    }
    local model = require("liger.model").from_config(config, { dtype = "bf16" }):init(1, 0.2)
    model:logits({ 1, 2 })
    assert.equal("f32", model.rope.tables_f32.cos.dtype)
  end)

  for _, name in ipairs({
    "default", "linear", "llama3", "partial", "dynamic_long", "yarn", "longrope_short",
    "longrope_long",
  }) do
    it("agree with the recorded case " .. name, function()
      local t, meta = helper.read_tensors(GOLDEN .. name .. ".safetensors")
      local o = cjson.decode(meta.options)
      local head_dim = o.head_dim or o.rotary_dim
      local settings = rope.from_config({
        rope_theta = o.theta, rope_scaling = o.scaling,
        partial_rotary_factor = o.rotary_dim / head_dim,
      }, head_dim)
      local inv_freq = t["out.inv_freq"]:to_table()
      local frequencies, factor = rope.frequencies(settings, o.seq_len)
      for i, freq in ipairs(frequencies) do
        helper.close(freq / inv_freq[i], 1, 1e-6)
      end
      helper.close(factor, t["out.attention_factor"], 1e-9)
      local positions, length = t["in.positions"]:to_table(), o.seq_len or 0
      for _, p in ipairs(positions) do
        length = math.max(length, p + 1)
      end
      if o.seq_len then
        assert.equal(o.seq_len, length)
      end
      local index = Tensor.from_table(positions, "i32")
      local cos, sin = rope.tables(settings, length, "f64")
      helper.close(ops.embedding(cos, index), t["out.cos"], 1e-9, "cos")
      helper.close(ops.embedding(sin, index), t["out.sin"], 1e-9, "sin")
      cos, sin = rope.tables(settings, length, "f32")
      helper.close(ops.embedding(cos, index), t["out.cos"], 1e-6, "cos")
      helper.close(ops.embedding(sin, index), t["out.sin"], 1e-6, "sin")
    end)
  end
end)

describe("partial rotation", function()
  it("B52: turns the first dimensions, by frequencies of their number, passes the rest", function()
    local settings = rope.from_config({ rope_theta = 1e4, partial_rotary_factor = 0.5 }, 8)
    helper.close(rope.frequencies(settings), { 1, 0.01 }, 1e-12)
    local cos, sin = rope.tables(settings, 2, "f64")
    local x = Tensor.from_table({ { { 1, 2, 3, 4, 5, 6, 7, 8 } } }, "f64")
    helper.close(
      ops.rope(x, cos, sin, helper.ids(1)),
      { -1.984111, 1.959901, 2.462378, 4.019800, 5, 6, 7, 8 },
      1e-6
    )
  end)
end)

describe("rope tables", function()
  it("grow, and keep the rows that were there", function()
    local settings = rope.from_config({}, 8)
    local small = rope.tables(settings, 10, "f32")
    assert.equal(64, small.shape[1])
    assert.equal(small, (rope.tables(settings, 64, "f32")))
    local large = rope.tables(settings, 65, "f32")
    assert.equal(128, large.shape[1])
    helper.same(large:narrow(1, 1, 64), small)
    assert.equal(large, (rope.tables(settings, 10, "f32")))
  end)
end)

describe("a rope config", function()
  it("reads the old keys and the new", function()
    local old = rope.from_config({
      rope_theta = 5e5, rope_scaling = with(LLAMA3, { rope_type = "llama3" }),
    }, 64)
    local new = rope.from_config({
      rope_parameters = with(LLAMA3, { rope_type = "llama3", rope_theta = 5e5 }),
    }, 64)
    helper.close(rope.frequencies(new), rope.frequencies(old), 0)
    assert.equal(10000, rope.from_config({}, 64).theta)
  end)

  it("is refused when it says what is not built or makes no sense", function()
    local function refused(config, ...)
      helper.raises(function()
        rope.from_config(config, 64)
      end, ...)
    end
    refused({ rope_scaling = { rope_type = "ntk", factor = 4 } }, "rope type is ntk", "linear")
    refused({ rope_scaling = { type = "longrope" } }, "longrope: short_factor is nil", "32 numbers")
    refused({ rope_scaling = { type = "longrope", short_factor = { 1, 2 } } },
      "longrope: short_factor is table", "wanted a list of 32 numbers above 0")
    refused({ rope_scaling = { type = "yarn" } }, "yarn: factor is nil, wanted a number above 0")
    refused({ rope_scaling = { type = "yarn", factor = 2, beta_fast = "x" } },
      "yarn: beta_fast is x, wanted a number above 0")
    refused({ rope_scaling = "linear" }, "rope_scaling is linear, wanted an object")
    refused({ rope_parameters = 3 }, "rope_parameters is 3, wanted an object")
    refused({ rope_scaling = { type = "linear" } }, "linear: factor is nil")
    refused({ rope_scaling = { type = "linear", factor = 0 } }, "linear: factor is 0")
    refused({
      rope_scaling = { type = "dynamic", factor = "2" },
    }, "dynamic: factor is 2, wanted a number")
    refused({
      rope_scaling = { type = "llama3", factor = 2, low_freq_factor = 1 },
    }, "llama3: high_freq_factor is nil")
    refused({ rope_theta = "1e4" }, "rope_theta is 1e4")
    refused({ rope_theta = -1 }, "rope_theta is -1")
    refused({ partial_rotary_factor = 0 }, "partial_rotary_factor is 0")
    refused({ partial_rotary_factor = 2 }, "partial_rotary_factor is 2")
  end)
end)
