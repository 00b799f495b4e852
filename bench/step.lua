-- Times a training step, or sampling, of a decoder with random weights: tokens a second, peak
-- bytes.
--   liger run bench/step.lua --shape tiny --what train --batch 256 --seq 10
--   liger run bench/step.lua --shape smollm2-135m --what sample --batch 32 --prompt 32 --seq 64
--   liger run bench/step.lua --shape qwen3-0.6b --batch 8 --seq 2048 --dtype bf16 --share
-- With --stdin it times one repeat for each line it reads, so that bench/peers/compare.py can take
-- turns with a peer.
local lib = require("liger.ffi")

-- With --share every C call of an operator is timed alone, in a run of its own.
local spent, total_spent = {}, 0
local op_names = {}
for _, op in ipairs(require("liger.schema").parse(require("abi").ops)) do
  op_names["lg_" .. op.name] = true
end
local measuring = false
for _, word in ipairs(require("liger.train.config").command().args) do
  if word == "--share" then
    local C, seconds = lib.C, require("ffi").new("double[1]")
    lib.C = setmetatable({}, {
      __index = function(t, name)
        local f = C[name]
        if type(f) ~= "cdata" or not op_names[name] then
          return f
        end
        local function timed(...)
          if not measuring then
            return f(...)
          end
          C.lg_timer_start(lib.ctx)
          local status = f(...)
          C.lg_timer_stop(lib.ctx, seconds)
          local key = name:gsub("^lg_", "")
          spent[key] = (spent[key] or 0) + seconds[0]
          total_spent = total_spent + seconds[0]
          return status
        end
        rawset(t, name, timed)
        return timed
      end,
    })
  end
end

local liger = require("liger")

local config = liger.config({
  shape = "tiny", -- tiny, smollm2-135m, qwen3-0.6b, llama-3.2-1b or llama-3-8b
  what = "train", -- train or sample
  batch = 256, -- sequences
  seq = 10, -- tokens a sequence; sample: prompt and new ones together
  prompt = 6, -- sample: tokens of the prompt
  seconds = 5, -- to spend
  checkpointing = false, -- train: recompute layers in the backward
  states = "f32", -- of the optimiser
  share = false, -- print the share of time by operator
  stdin = false,
  out = "", -- no run folder is made
}, {
  shape = { "tiny", "smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3-8b" },
  what = { "train", "sample" },
})

local function shape(family, layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, theta)
  return {
    model_type = family, vocab_size = vocab, hidden_size = hidden, num_hidden_layers = layers,
    num_attention_heads = heads, num_key_value_heads = kv_heads, head_dim = head_dim,
    intermediate_size = intermediate, rms_norm_eps = 1e-6, rope_theta = theta,
    tie_word_embeddings = true, max_position_embeddings = 16384,
  }
end

local SHAPES = {
  tiny = shape("qwen3", 2, 128, 8, 4, 16, 384, 256, 1e4),
  ["smollm2-135m"] = shape("llama", 30, 576, 9, 3, 64, 1536, 49152, 1e5),
  ["qwen3-0.6b"] = shape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 1e6),
  ["llama-3.2-1b"] = shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, 5e5),
  ["llama-3-8b"] = shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 5e5),
}
SHAPES["llama-3-8b"].tie_word_embeddings = false

local model_config = SHAPES[config.shape]
local model = liger.from_config(model_config, { dtype = config.dtype }):init(config.seed, 0.02)
model.checkpointing = config.checkpointing

local function sequences(length)
  local words = require("ffi").new("uint32_t[?]", config.batch * length)
  lib.C.lg_philox(config.seed, 1, 0, config.batch * length, words)
  local list = {}
  for i = 1, config.batch do
    list[i] = {}
    for j = 1, length do
      list[i][j] = words[(i - 1) * length + j - 1] % model_config.vocab_size
    end
  end
  return list
end

local tokens, step
if config.what == "train" then
  tokens = config.batch * config.seq
  -- One target more than tokens, as the peer has: every position predicts.
  local samples = {}
  for i, ids in ipairs(sequences(config.seq + 1)) do
    samples[i] = { ids = { ids[1] }, completion = { unpack(ids, 2) } }
  end
  local settings = { lr = 1e-5, states = config.states ~= "f32" and config.states or nil }
  local optimizer = liger.optim.adamw(model:parameters(), settings)
  step = function()
    local scope = liger.memory.open_scope()
    local batch = liger.pack.completions(samples)
    model:cross_entropy(batch, 1 / batch.num_completion):backward()
    optimizer:step()
    liger.memory.close_scope(scope)
  end
else
  local new = config.seq - config.prompt
  tokens = config.batch * new
  local prompts = sequences(config.prompt)
  step = function()
    liger.generate(model, prompts, { max_new = new, stop = {}, seed = config.seed })
  end
end

local now = lib.C.lg_sys_time
local function time(n)
  local start = lib.C.lg_sys_time()
  for _ = 1, n do
    step()
  end
  lib.check(lib.C.lg_sync(lib.ctx))
  return (lib.C.lg_sys_time() - start) / n
end

time(3)
local inner = math.max(1, math.floor(0.05 / time(1))) -- a repeat lasts 50 ms or more

if config.stdin then
  for _ in io.lines() do
    local t = time(inner)
    print(('{"ms":%.3f,"tokens_per_s":%.0f}'):format(t * 1e3, tokens / t))
    io.stdout:flush()
  end
  os.exit(0)
end

local times, start = {}, now()
repeat
  times[#times + 1] = time(inner)
until now() - start > config.seconds and #times >= 5
local peak = liger.memory.stats().peak / 2 ^ 20
if config.share then
  measuring = true
  step()
end
table.sort(times)
local median, least = times[math.ceil(#times / 2)], times[1]
print(
  ("%s %s %s [%d,%d]  %.0f tokens/s (best %.0f)  %.2f ms  peak %.1f MiB  %s"):format(
    config.shape, config.what, config.dtype, config.batch, config.seq, tokens / median,
    tokens / least, median * 1e3,
    peak, require("ffi").string(lib.C.lg_context_describe(lib.ctx))
  )
)
if config.share then
  local names = {}
  for name in pairs(spent) do
    names[#names + 1] = name
  end
  table.sort(names, function(a, b)
    return spent[a] > spent[b]
  end)
  for _, name in ipairs(names) do
    local share = 100 * spent[name] / total_spent
    print(("  %5.1f%%  %-26s %.3f ms"):format(share, name, spent[name] * 1e3))
  end
end
