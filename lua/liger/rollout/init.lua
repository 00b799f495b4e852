-- Batched generation over the paged cache. Prompts join when pages are free, their group shares the
-- prompt's pages, sequences leave when they stop. The draw of a token depends on (seed, sequence
-- number, position) alone, and every op treats rows alone, so a sequence is the same whoever shares
-- its batch, and its log-probabilities are those of a training forward: on the CPU bit for bit; on
-- CUDA too where a product's algorithms for few and many rows agree (kernels/gemm.cuh), else to
-- about 1e-7.
local autograd = require("liger.autograd")
local cache_module = require("liger.rollout.cache")
local forward = require("liger.rollout.forward")
local lib = require("liger.ffi")
local memory = require("liger.memory")
local options_of = require("liger.options")

local M = {}

local PAGE = cache_module.page_size

local DEFAULTS = {
  group = 1, -- completions a prompt
  max_new = 128, -- tokens a completion at most
  temperature = 1, -- 0: greedy
  top_k = 0, -- 0: off
  top_p = 1, -- 1: off
  min_p = 0, -- 0: off
  greedy = false,
  stop = false, -- list of ids that end a completion; default: the model's
  seed = 0,
  first_sequence = 0, -- number of the first completion; later ones count on
  -- Bytes of the cache at most; what does not fit waits. Default: 1 GiB, on a GPU half of what it
  -- could still give.
  cache_bytes = false,
  on_token = false, -- function(completion, id, logp), as they come
  interrupted = false, -- function() that ends the generation when it returns true
}

local share = { min = 0, max = 1 }
local RANGES = {
  group = { min = 1, max = 2 ^ 20, whole = true },
  max_new = { min = 0, max = 2 ^ 30, whole = true },
  temperature = { min = 0 }, top_k = { min = -1, max = 2 ^ 31, whole = true }, top_p = share,
  min_p = share, seed = { min = -2 ^ 52, max = 2 ^ 52, whole = true },
  first_sequence = { min = 0, max = 2 ^ 52, whole = true }, cache_bytes = { min = 0 },
  stop = { kind = "table", wanted = "a list of ids" },
  on_token = { kind = "function", wanted = "a function" },
  interrupted = { kind = "function", wanted = "a function" },
}

local PREFILL_TOKENS = 8192 -- prompt tokens that one forward takes in

local function check_options(options)
  local o = options_of.over("generate", DEFAULTS, RANGES, options)
  o.cache_bytes = o.cache_bytes or lib.on_cpu and 2 ^ 30 or memory.available() / 2
  if o.temperature == 0 then
    o.greedy, o.temperature = true, 1
  end
  return o
end

local function check_id(what, id)
  if type(id) ~= "number" or id % 1 ~= 0 then
    lib.raise(("generate: %s has %s, wanted whole numbers"):format(what, tostring(id)))
  end
end

-- ---- one generation ----

local Generation = {}
Generation.__index = Generation

local function pages_for(tokens)
  return math.ceil(tokens / PAGE)
end

-- Pages that a prompt's group takes at most: the full pages once, the rest a completion.
local function pages_of_group(self, prompt)
  local full = math.floor(#prompt / PAGE)
  return full + self.options.group * (pages_for(#prompt + self.options.max_new) - full)
end

-- Gives the rows what was drawn for them.
local function take(self, rows, id, logp)
  local id_data, logp_data = id:read(), logp:read()
  local o = self.options
  local on_token = o.on_token
  for i = 1, #rows do
    local row = rows[i]
    local result = row.result
    local n = #result.ids + 1
    row.last = id_data[i - 1]
    result.ids[n], result.logp[n] = row.last, tonumber(logp_data[i - 1])
    if self.stop[row.last] then
      result.stopped, row.done = true, true
    elseif n == o.max_new then
      row.done = true
    end
    if on_token then
      on_token(row.index, row.last, result.logp[n])
    end
  end
end

-- The rows of a prompt's group: the first owns the pages the prompt was written to, the others
-- share the full ones and get copies of the rest. Adds them to `rows`, the copies' slots to `from`
-- and `to`.
local function group_rows(self, prompt, index, pages, rows, from, to)
  local full = math.floor(#prompt / PAGE)
  for g = 1, self.options.group do
    local own = {}
    for i = 1, full do
      own[i] = pages[i]
      if g > 1 then
        self.cache:share(pages[i])
      end
    end
    if #prompt % PAGE > 0 then
      own[full + 1] = g == 1 and pages[full + 1] or self.cache:take()
      if g > 1 then
        for t = full * PAGE, #prompt - 1 do
          from[#from + 1] = pages[full + 1] * PAGE + t % PAGE
          to[#to + 1] = own[full + 1] * PAGE + t % PAGE
        end
      end
    end
    local at = (index - 1) * self.options.group + g
    rows[#rows + 1] = {
      index = at,
      number = self.options.first_sequence + at - 1,
      pages = own,
      length = #prompt,
      most_pages = pages_for(#prompt + self.options.max_new),
      result = self.results[at],
    }
  end
end

-- Runs waiting prompts through the model, as many as pages and PREFILL_TOKENS allow, and draws
-- their first tokens.
local function admit(self)
  local prompts, first, tokens = {}, self.next, 0
  while self.next <= #self.prompts do
    local prompt = self.prompts[self.next]
    local pages = pages_of_group(self, prompt)
    if pages > self.unreserved or (tokens > 0 and tokens + #prompt > PREFILL_TOKENS) then
      break
    end
    self.unreserved = self.unreserved - pages
    tokens = tokens + #prompt
    prompts[#prompts + 1] = prompt
    self.next = self.next + 1
  end
  if #prompts == 0 then
    return
  end
  local scope = memory.open_scope()
  local pages, rows, from, to = {}, {}, {}, {}
  for i, prompt in ipairs(prompts) do
    pages[i] = {}
    for p = 1, pages_for(#prompt) do
      pages[i][p] = self.cache:take()
    end
    group_rows(self, prompt, first + i - 1, pages[i], rows, from, to)
  end
  take(self, rows, forward.prefill(self, prompts, pages, rows, from, to))
  memory.close_scope(scope)
  for _, row in ipairs(rows) do
    self.active[#self.active + 1] = row
  end
end

-- Rows that are done give their pages back and leave.
local function retire(self)
  local kept = {}
  for _, row in ipairs(self.active) do
    if row.done then
      for _, page in ipairs(row.pages) do
        self.cache:drop(page)
      end
    else
      kept[#kept + 1] = row
    end
  end
  if #kept < #self.active then
    self.active = kept
    -- Free pages less those that the running rows may still take.
    self.unreserved = #self.cache.free
    for _, row in ipairs(kept) do
      self.unreserved = self.unreserved - (row.most_pages - #row.pages)
    end
  end
end

-- One token for every active row.
local function decode(self)
  local rows = self.active
  local widest, longest = 0, 0
  for _, row in ipairs(rows) do
    if row.length % PAGE == 0 then
      row.pages[#row.pages + 1] = self.cache:take()
    end
    widest = math.max(widest, #row.pages)
    longest = math.max(longest, row.length + 1)
  end
  local scope = memory.open_scope()
  local id, logp = forward.decode(self, rows, widest, longest)
  for _, row in ipairs(rows) do
    row.length = row.length + 1
  end
  take(self, rows, id, logp)
  memory.close_scope(scope)
end

local function run(self)
  while self.next <= #self.prompts or #self.active > 0 do
    admit(self)
    retire(self)
    if #self.active > 0 then
      decode(self)
      retire(self)
    end
    if self.options.interrupted and self.options.interrupted() then
      return
    end
  end
end

--- Generates completions.
---@param model liger.Decoder
---@param prompts integer[][]  ids of each prompt, at least one
---@param options? table       group, max_new, temperature, top_k, top_p, min_p, greedy, stop, seed,
---   first_sequence, ...
---@return { ids: integer[], logp: number[], stopped: boolean, prompt: integer }[]  group
---   completions a prompt, prompt by prompt;
---   ids hold the stop id; logp is under the softmax at the temperature (at 1 when greedy); stopped
---   is false when max_new cut it
function M.generate(model, prompts, options)
  local o = check_options(options)
  local self = setmetatable({
    model = model,
    prompts = prompts,
    options = o,
    stop = {},
    active = {},
    results = {},
    next = 1,
  }, Generation)
  for _, id in ipairs(o.stop or model.stop_ids or {}) do
    check_id("stop", id)
    self.stop[id] = true
  end
  local wanted, largest = 0, 0
  self.longest = 0
  for i, prompt in ipairs(prompts) do
    if type(prompt) ~= "table" then
      lib.raise(("generate: prompt %d is a %s, wanted a list of ids"):format(i, type(prompt)))
    end
    for _, id in ipairs(prompt) do
      check_id(("prompt %d"):format(i), id)
    end
    if #prompt == 0 then
      lib.raise(("generate: prompt %d is empty, wanted at least one token"):format(i))
    end
    local limit = model.config.max_position_embeddings
    if limit and #prompt + o.max_new > limit then
      lib.raise(
        ("generate: prompt %d has %d tokens and max_new is %d, wanted at most %d together"):format(
          i, #prompt, o.max_new, limit
        )
      )
    end
    for g = 1, o.group do
      self.results[(i - 1) * o.group + g] = { ids = {}, logp = {}, stopped = false, prompt = i }
    end
    local pages = pages_of_group(self, prompt)
    wanted, largest = wanted + pages, math.max(largest, pages)
    self.longest = math.max(self.longest, #prompt + o.max_new)
  end
  if o.max_new == 0 or #prompts == 0 then
    return self.results
  end
  local affordable = math.floor(o.cache_bytes / cache_module.page_bytes(model.shape, model.dtype))
  if affordable < largest then
    lib.raise(
      (
        "generate: a prompt needs %d cache pages and cache_bytes = %d gives %d; raise cache_bytes "
          .. "or lower group or max_new"
      ):format(
        largest, o.cache_bytes, affordable
      )
    )
  end
  local pages = math.min(wanted, affordable)
  local scope = memory.open_scope()
  self.cache = cache_module.new(model.shape, model.dtype, pages)
  self.unreserved = pages
  forward.open(self)
  autograd.no_grad(run, self)
  forward.close(self)
  memory.close_scope(scope)
  return self.results
end

return M
