-- A batch of completions on its way from the sampler to the loss: rewards, advantages, and packed
-- micro-batches of what has a gradient. Of several processes each samples, scores and packs its
-- share, and knows all samples.
local lib = require("liger.ffi")
local pack = require("liger.nn.pack")
local ranks = require("liger.ranks")
local rollout = require("liger.rollout")
local score = require("liger.rollout.score")
local Tensor = require("liger.tensor")

local Batch = {}
Batch.__index = Batch

local M = {}

---@class liger.Sample
---@field row table             the data's row: prompt and its columns
---@field ids integer[]         of the prompt
---@field completion integer[]  ids, the stop id among them
---@field logp number[]         of the completion, at the sampling temperature
---@field stopped boolean       false: cut at max_new tokens
---@field text string           the completion without its stop token
---@field rewards? number[]      of each function, NaN where it does not apply
---@field reward? number         their weighted sum; nil: none applies
---@field advantage? number|number[]  of the sample, or of each token
---@field old_logp? number[]      under the policy before its update; nil: logp
---@field sampler_logp? number[]  logp, where there is old_logp
---@field sampler_ratio? number[] factor of the policy term
---@field ref_logp? number[]
---@field masked? boolean       takes no part in the loss

-- What the processes generated for their shares of the prompts, all of it, in order.
local function generate_shares(model, prompts, options)
  local own, before = ranks.share(prompts)
  local group, first = options.group or 1, options.first_sequence or 0
  options.first_sequence = first + before * group
  local results = rollout.generate(model, own, options)
  options.first_sequence = first
  for _, result in ipairs(results) do
    result.prompt = result.prompt + before
  end
  return ranks.join(results)
end

--- Completions of each row's prompt.
---@param model liger.Decoder
---@param tokenizer liger.Tokenizer
---@param rows table[]    with `ids`, the prompt's
---@param options table   of rollout.generate
---@return liger.Batch
function M.generate(model, tokenizer, rows, options)
  local prompts = {}
  for i, row in ipairs(rows) do
    prompts[i] = row.ids
  end
  local self = setmetatable({ samples = {}, group = options.group or 1, num_tokens = 0 }, Batch)
  local results = generate_shares(model, prompts, options)
  -- Completions that an interrupt cut are no samples of the model.
  self.interrupted = options.interrupted and options.interrupted() or false
  for i, result in ipairs(results) do
    local ids, shown = result.ids, {}
    for j = 1, #ids - (result.stopped and 1 or 0) do
      shown[j] = ids[j]
    end
    self.num_tokens = self.num_tokens + #prompts[result.prompt] + #ids
    self.samples[i] = {
      row = rows[result.prompt],
      ids = prompts[result.prompt],
      completion = ids,
      logp = result.logp,
      stopped = result.stopped,
      text = tokenizer:decode(shown, { skip_special = true }),
    }
  end
  return self
end

local function check_reward(value, s, i)
  if type(value) ~= "number" or value - value ~= 0 then
    local got = type(value) ~= "number" and type(value) or value ~= value and "NaN"
      or tostring(value)
    lib.raise(
      (
        "reward: it gave %s for completion %d, wanted a finite number; the completion is %q"
      ):format(got, i, s.text)
    )
  end
end

--- Scores every sample: by each function, NaN where it does not apply, and by their weighted sum.
---@param rewards liger.Rewards|fun(completion: string, row: table): number|nil
---@return number mean   over the samples that a function applies to
---@return number sum
---@return integer count  of these samples
function Batch:score(rewards)
  local functions = type(rewards) == "table" and rewards.functions or { rewards }
  local weights = type(rewards) == "table" and rewards.weights
  local sum, count, scored = 0, 0, {}
  local own, before = ranks.share(self.samples)
  for i, s in ipairs(own) do
    scored[i] = {}
    for f, reward in ipairs(functions) do
      local value = reward(s.text, s.row, s)
      if value ~= nil then
        check_reward(value, s, before + i)
      end
      scored[i][f] = value or 0 / 0
    end
  end
  for i, values in ipairs(ranks.join(scored)) do
    local s = self.samples[i]
    s.rewards, s.reward = values, nil
    for f, value in ipairs(values) do
      if value == value then
        s.reward = (s.reward or 0) + (weights and weights[f] or 1) * value
      end
    end
    if s.reward then
      sum, count = sum + s.reward, count + 1
    end
  end
  if count == 0 and #self.samples > 0 then
    lib.raise(
      ("reward: it gave nil for each of %d completions, wanted a number; the first is %q"):format(
        #self.samples, self.samples[1].text
      )
    )
  end
  return sum / math.max(count, 1), sum, count
end

--- Rewards in order, of each function.
---@return number[][]
function Batch:rewards()
  local list = {}
  for i, s in ipairs(self.samples) do
    list[i] = s.rewards
  end
  return list
end

--- Gives each sample its advantage, or one for each of its tokens.
---@param advantages (number|number[])[]
function Batch:set_advantages(advantages)
  for i, s in ipairs(self.samples) do
    s.advantage = advantages[i]
  end
end

-- Gives each sample a list of its completion's log-probabilities under a model.
local function set_logp(self, name, model, options)
  local sequences, lists = {}, {}
  local own = ranks.share(self.samples)
  for i, s in ipairs(own) do
    local ids = {}
    for _, list in ipairs({ s.ids, s.completion }) do
      for _, id in ipairs(list) do
        ids[#ids + 1] = id
      end
    end
    sequences[i] = ids
  end
  for i, scored in ipairs(score.sequences(model, sequences, options)) do
    local s, list = own[i], {}
    for j = 1, #s.completion do
      list[j] = scored.logp[#s.ids - 1 + j]
    end
    lists[i] = list
  end
  for i, list in ipairs(ranks.join(lists)) do
    self.samples[i][name] = list
  end
end

--- Gives each sample its log-probabilities under a reference model.
---@param reference liger.Decoder
---@param options table  temperature
function Batch:set_reference(reference, options)
  set_logp(self, "ref_logp", reference, options)
end

--- Gives each sample its log-probabilities under the policy before its update, beside those that
--- the sampler gave.
---@param model liger.Decoder
---@param options table  temperature
function Batch:set_old(model, options)
  set_logp(self, "old_logp", model, options)
  for _, s in ipairs(self.samples) do
    s.sampler_logp = s.logp
  end
end

--- Leaves samples that were cut at max_new out of the loss and its counts.
function Batch:mask_truncated()
  for _, s in ipairs(self.samples) do
    s.masked = not s.stopped
  end
end

--- Tokens that count, a sample; 0 for a masked one.
---@return integer[]
function Batch:lengths()
  local list = {}
  for i, s in ipairs(self.samples) do
    list[i] = s.masked and 0 or #s.completion
  end
  return list
end

--- Gives each sample the weight of its tokens.
---@param weights number[]
function Batch:set_weights(weights)
  for i, s in ipairs(self.samples) do
    s.weight = weights[i]
  end
end

-- Whether the advantage of any token is not 0.
local function has_advantage(s)
  if type(s.advantage) == "number" then
    return s.advantage ~= 0
  end
  for _, a in ipairs(s.advantage) do
    if a ~= 0 then
      return true
    end
  end
  return false
end

-- A [K] tensor from a value a token.
local function column(samples, K, dtype, value)
  local t = Tensor.stage({ K }, dtype)
  local data, k = t:data(), 0
  for _, s in ipairs(samples) do
    for j = 1, #s.completion do
      data[k] = value(s, j)
      k = k + 1
    end
  end
  return t
end

--- Packs samples with what the loss needs: mask, weight, advantage, old_logp (and ref_logp,
--- sampler_logp and sampler_ratio where samples have them), [K] each.
---@param samples liger.Sample[]
---@return liger.Pack
function M.pack(samples)
  local p = pack.completions(samples)
  local K = p.num_completion
  p.samples = samples
  p.mask = column(samples, K, "f32", function(s)
    return s.masked and 0 or 1
  end)
  p.weight = column(samples, K, "f32", function(s)
    return s.masked and 0 or s.weight
  end)
  p.advantage = column(samples, K, "f32", function(s, j)
    return type(s.advantage) == "table" and s.advantage[j] or s.advantage
  end)
  p.old_logp = column(samples, K, "f32", function(s, j)
    return (s.old_logp or s.logp)[j]
  end)
  for _, name in ipairs({ "ref_logp", "sampler_logp", "sampler_ratio" }) do
    if samples[1] and samples[1][name] then
      p[name] = column(samples, K, "f32", function(s, j)
        return s[name][j]
      end)
    end
  end
  return p
end

--- Micro-batches of the samples that have a gradient. A sample whose gradient is known to be 0
--- before the forward (masked, or advantage 0 without a KL term) is left out; its tokens still
--- count in the weights of the others.
---@param max_tokens integer  a micro-batch; 0: no limit
---@param keep_all? boolean   the loss has a term beside the advantage
---@return fun(): liger.Pack|nil
function Batch:split(max_tokens, keep_all)
  local kept = {}
  for _, s in ipairs(self.samples) do
    if not s.masked and #s.completion > 0 and (keep_all or has_advantage(s)) then
      kept[#kept + 1] = s
    end
  end
  self.num_skipped = #self.samples - #kept
  local parts, i = pack.split(kept, max_tokens), 0
  return function()
    i = i + 1
    return parts[i] and M.pack(parts[i])
  end
end

--- Lengths as TRL names them.
---@return table<string, number>
function Batch:metrics()
  local m = {
    total = 0, low = math.huge, high = 0, cut = 0, ended = 0, ended_total = 0,
    ended_low = math.huge, ended_high = 0,
  }
  for _, s in ipairs(self.samples) do
    local n = #s.completion
    m.total, m.low, m.high = m.total + n, math.min(m.low, n), math.max(m.high, n)
    if s.stopped then
      m.ended, m.ended_total = m.ended + 1, m.ended_total + n
      m.ended_low, m.ended_high = math.min(m.ended_low, n), math.max(m.ended_high, n)
    else
      m.cut = m.cut + 1
    end
  end
  local count = math.max(#self.samples, 1)
  return {
    ["completions/mean_length"] = m.total / count,
    ["completions/min_length"] = #self.samples > 0 and m.low or 0,
    ["completions/max_length"] = m.high,
    ["completions/clipped_ratio"] = m.cut / count,
    ["completions/mean_terminated_length"] = m.ended > 0 and m.ended_total / m.ended or 0,
    ["completions/min_terminated_length"] = m.ended > 0 and m.ended_low or 0,
    ["completions/max_terminated_length"] = m.ended_high,
  }
end

return M
