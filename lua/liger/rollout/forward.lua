-- The model's work in a generation: a forward over prompts, and one over the rows' new positions,
-- each with the draw that follows. Keys and values lie in the paged cache. On a device the second
-- one is recorded and replayed, since its launches would cost more than its work.
local cache_module = require("liger.rollout.cache")
local graph = require("liger.graph")
local lib = require("liger.ffi")
local memory = require("liger.memory")
local ops = require("liger.ops")
local pack = require("liger.nn.pack")
local Tensor = require("liger.tensor")

local M = {}

local PAGE = cache_module.page_size
local LEAST_ROWS = 8 -- of a recorded step
local RECORDING_STEPS = 16 -- steps left that make a recording worth its time

-- The rows' numbers and positions, for the draw.
local function stage_draw(rows)
  local B = #rows
  local sequence, position = Tensor.stage({ B }, "i64"), Tensor.stage({ B }, "i32")
  local sequence_data, position_data = sequence:data(), position:data()
  for i, row in ipairs(rows) do
    sequence_data[i - 1], position_data[i - 1] = row.number, row.length
  end
  return sequence, position
end

-- Draws an id for each row of z.
local function draw(self, z, sequence, position)
  local o = self.options
  local top_k = o.greedy and 1 or math.max(o.top_k, 0)
  return ops.sample(z, sequence, position, o.seed, top_k, o.top_p, o.min_p)
end

local function logits(self, hidden)
  return ops.linear_logits(
    hidden, self.model.weights.head, nil, self.options.greedy and 1 or self.options.temperature, 0
  )
end

-- Row i (from 0) of a page table.
local function put_pages(page_data, widest, i, pages)
  for p = 0, widest - 1 do
    page_data[i * widest + p] = pages[p + 1] or 0
  end
end

-- ---- prompts ----

-- For prompts and the pages they will lie on: `slot`, the place of each token in the cache; `last`,
-- each prompt's last row and its position; `page` and `length` for their attention.
local function prefill_tensors(prompts, pages, num_tokens)
  local S, widest = #prompts, 1
  for i = 1, S do
    widest = math.max(widest, #pages[i])
  end
  local slot, page = Tensor.stage({ num_tokens }, "i32"), Tensor.stage({ S, widest }, "i32")
  local last = { rows = Tensor.stage({ S }, "i32"), position = Tensor.stage({ S }, "i32") }
  local length = Tensor.stage({ S }, "i32")
  local slot_data, page_data, length_data = slot:data(), page:data(), length:data()
  local row_data, position_data = last.rows:data(), last.position:data()
  local at = 0
  for i = 1, S do
    local own, n = pages[i], #prompts[i]
    for t = 0, n - 1 do
      slot_data[at + t] = own[math.floor(t / PAGE) + 1] * PAGE + t % PAGE
    end
    at = at + n
    row_data[i - 1], position_data[i - 1], length_data[i - 1] = at - 1, n - 1, n
    put_pages(page_data, widest, i - 1, own)
  end
  return slot, last, page, length
end

--- Runs prompts through the model, into the cache, and draws each row's first token.
---@param self table         a generation
---@param prompts integer[][]
---@param pages integer[][]  of each prompt
---@param rows table[]       a group of them a prompt
---@param from integer[]     slots to copy, for the groups' rows
---@param to integer[]       where to
---@return liger.Tensor id   [B] i32
---@return liger.Tensor logp [B]
function M.prefill(self, prompts, pages, rows, from, to)
  local batch = pack.sequences(prompts)
  local slot, last, page, length = prefill_tensors(prompts, pages, batch.num_tokens)
  local cache, model = self.cache, self.model
  -- The last layer's queries are the prompts' last ones alone.
  local function attend(layer, q, k, v)
    local k_cache, v_cache = cache.k[layer], cache.v[layer]
    ops.cache_write(k, v, slot, k_cache, v_cache)
    if layer == #cache.k then
      return model:attention_decode(layer, q, k_cache, v_cache, page, length, PAGE)
    end
    return model:attention(layer, q, k, v, batch.cu_seqlens)
  end
  local hidden = model:forward(batch.ids, batch.position, batch.max_length, attend, last)
  if #from > 0 then
    local from_slot, to_slot = Tensor.from_table(from, "i32"), Tensor.from_table(to, "i32")
    for layer = 1, #cache.k do
      ops.cache_copy(from_slot, to_slot, cache.k[layer], cache.v[layer])
    end
  end
  -- Logits once a prompt, then a row of them each completion.
  local z = logits(self, hidden)
  local group = self.options.group
  if group > 1 then
    local of_prompt = {}
    for i = 1, #rows do
      of_prompt[i] = math.floor((i - 1) / group)
    end
    z = ops.embedding(z, Tensor.from_table(of_prompt, "i32"))
  end
  return draw(self, z, stage_draw(rows))
end

-- ---- new positions ----

-- Fills the inputs of a step of B rows: ids, position, slot and length [B], page [B,widest], and
-- the draw's. Past the rows it repeats the last, which writes and draws the same once more.
local function fill(inputs, rows, B, widest)
  local ids, position, slot = inputs.ids:data(), inputs.position:data(), inputs.slot:data()
  local length, page = inputs.length:data(), inputs.page:data()
  local sequence, draw_position = inputs.sequence:data(), inputs.draw_position:data()
  for i = 0, B - 1 do
    local row = rows[math.min(i + 1, #rows)]
    local at, pages = row.length, row.pages
    ids[i], position[i], length[i] = row.last, at, at + 1
    slot[i] = pages[#pages] * PAGE + at % PAGE
    put_pages(page, widest, i, pages)
    sequence[i], draw_position[i] = row.number, at + 1
  end
end

local function stage_inputs(B, widest)
  local function stage(dtype, ...)
    return Tensor.stage({ ... }, dtype)
  end
  return {
    ids = stage("i32", B), position = stage("i32", B), slot = stage("i32", B),
    length = stage("i32", B), page = stage("i32", B, widest),
    sequence = stage("i64", B), draw_position = stage("i32", B),
  }
end

-- The model over the new positions, and the draw.
local function step(self, inputs, longest)
  local cache, model = self.cache, self.model
  local hidden = model:forward(inputs.ids, inputs.position, longest, function(layer, q, k, v)
    local k_cache, v_cache = cache.k[layer], cache.v[layer]
    ops.cache_write(k, v, inputs.slot, k_cache, v_cache)
    return model:attention_decode(layer, q, k_cache, v_cache, inputs.page, inputs.length, PAGE)
  end)
  return draw(self, logits(self, hidden), inputs.sequence, inputs.draw_position)
end

-- The smallest recording that the rows fit in, or the rows that a new one is to have; neither where
-- none is worth its making. A recording takes a power of two of rows.
local function choose(self, rows)
  local B, left = LEAST_ROWS, 0
  while B < #rows do
    B = B * 2
  end
  for _, row in ipairs(rows) do
    left = math.max(left, self.options.max_new - #row.result.ids)
  end
  if self.recorded[B] or left >= RECORDING_STEPS then
    return self.recorded[B], B
  end
  while B < self.most_rows do
    B = B * 2
    if self.recorded[B] then
      return self.recorded[B], B
    end
  end
end

-- The recorded step for these rows, its inputs filled in, or nil. It takes what is longest and
-- widest of the whole generation.
local function recorded_step(self, rows)
  local found, B = choose(self, rows)
  local widest = math.ceil(self.longest / PAGE)
  if found then
    for _, input in pairs(found.inputs) do
      input:restage()
    end
    fill(found.inputs, rows, B, widest)
    for _, input in pairs(found.inputs) do
      input:upload()
    end
  elseif B then
    found = { inputs = stage_inputs(B, widest) }
    for _, input in pairs(found.inputs) do
      input:keep()
    end
    fill(found.inputs, rows, B, widest)
    found.graph = graph.new(function()
      return step(self, found.inputs, self.longest)
    end)
    self.recorded[B], self.most_rows = found, math.max(self.most_rows, B)
  end
  return found and found.graph
end

--- One more token for every row.
---@param self table
---@param rows table[]
---@param widest integer   pages of the row with the most
---@param longest integer  more than the largest position
---@return liger.Tensor id   [B] i32, B at least the number of rows
---@return liger.Tensor logp [B]
function M.decode(self, rows, widest, longest)
  local recorded = self.recorded and recorded_step(self, rows)
  if recorded then
    return recorded()
  end
  local inputs = stage_inputs(#rows, widest)
  fill(inputs, rows, #rows, widest)
  return step(self, inputs, longest)
end

--- Before the first step.
function M.open(self)
  -- A rope table that depends on the longest sequence of now cannot be recorded.
  local kind = self.model.rope.kind
  if not lib.on_cpu and kind ~= "dynamic" and kind ~= "longrope" then
    self.recorded, self.most_rows = {}, 0
  end
end

--- After the last one.
function M.close(self)
  for _, recorded in pairs(self.recorded or {}) do
    recorded.graph:free()
    for _, input in pairs(recorded.inputs) do
      memory.release(input.storage)
    end
  end
end

return M
