-- The pre-norm decoder that Llama and its relatives share: embedding, blocks of attention and
-- SwiGLU, final norm, head. The projections q, k, v are one matrix, and so are gate and up: one
-- product each. Their Hugging Face names are views of its rows.
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local memory = require("liger.memory")
local ops = require("liger.ops")
local pack = require("liger.nn.pack")
local rope = require("liger.nn.rope")
local Tensor = require("liger.tensor")

---@class liger.Parameter
---@field name string
---@field tensor liger.Tensor
---@field parts table[]  { name, start, length }: rows under their Hugging Face names

---@class liger.Decoder
---@field shape table        vocab, hidden, layers, heads, kv_heads, head_dim, intermediate, eps,
---   tied, qk_norm, qkv_bias, windows, ...
---@field config table       the Hugging Face config
---@field dtype string
---@field list liger.Parameter[]
---@field weights table      tensors by short name; weights.blocks[i]
local Decoder = {}
Decoder.__index = Decoder

local M = {}

local function add(self, name, shape, parts)
  local tensor = Tensor.empty(shape, self.dtype):keep():requires_grad_()
  self.list[#self.list + 1] = {
    name = name, tensor = tensor, parts = parts or { { name, 1, shape[1] } },
  }
  return tensor
end

local function add_block(self, i)
  local s = self.shape
  local prefix = ("model.layers.%d."):format(i - 1)
  local q_rows, kv_rows = s.heads * s.head_dim, s.kv_heads * s.head_dim
  local function qkv_parts(kind)
    return {
      { prefix .. "self_attn.q_proj." .. kind, 1, q_rows },
      { prefix .. "self_attn.k_proj." .. kind, q_rows + 1, kv_rows },
      { prefix .. "self_attn.v_proj." .. kind, q_rows + kv_rows + 1, kv_rows },
    }
  end
  local function gate_up_parts(kind)
    return {
      { prefix .. "mlp.gate_proj." .. kind, 1, s.intermediate },
      { prefix .. "mlp.up_proj." .. kind, s.intermediate + 1, s.intermediate },
    }
  end
  local rows = q_rows + 2 * kv_rows
  local b = {}
  b.attention_norm = add(self, prefix .. "input_layernorm.weight", { s.hidden })
  b.qkv = add(self, prefix .. "self_attn.qkv.weight", { rows, s.hidden }, qkv_parts("weight"))
  b.qkv_bias = s.qkv_bias and add(self, prefix .. "self_attn.qkv.bias", { rows }, qkv_parts("bias"))
  b.q_norm = s.qk_norm and add(self, prefix .. "self_attn.q_norm.weight", { s.head_dim })
  b.k_norm = s.qk_norm and add(self, prefix .. "self_attn.k_norm.weight", { s.head_dim })
  b.out = add(self, prefix .. "self_attn.o_proj.weight", { s.hidden, q_rows })
  b.out_bias = s.out_bias and add(self, prefix .. "self_attn.o_proj.bias", { s.hidden })
  b.mlp_norm = add(self, prefix .. "post_attention_layernorm.weight", { s.hidden })
  b.gate_up = add(
    self, prefix .. "mlp.gate_up.weight", { 2 * s.intermediate, s.hidden }, gate_up_parts("weight")
  )
  b.gate_up_bias = s.mlp_bias and add(
    self, prefix .. "mlp.gate_up.bias", { 2 * s.intermediate }, gate_up_parts("bias")
  )
  b.down = add(self, prefix .. "mlp.down_proj.weight", { s.hidden, s.intermediate })
  b.down_bias = s.mlp_bias and add(self, prefix .. "mlp.down_proj.bias", { s.hidden })
  return b
end

--- A decoder with memory for its weights, not initialised.
---@param shape table   vocab, hidden, layers, heads, kv_heads, head_dim, intermediate, eps, tied,
---   qk_norm, qkv_bias, out_bias, mlp_bias; windows: by layer, how many keys a query sees at most
---   (itself the last; 0: all), nil: all
---@param config table  the Hugging Face config it came from
---@param dtype string
---@return liger.Decoder
function M.new(shape, config, dtype)
  if shape.head_dim % 2 ~= 0 then
    lib.raise(("config: head size is %g, wanted an even whole number"):format(shape.head_dim))
  end
  if shape.heads % shape.kv_heads ~= 0 then
    lib.raise(
      ("config: %d heads over %d key/value heads, wanted a multiple"):format(
        shape.heads, shape.kv_heads
      )
    )
  end
  local self = setmetatable(
    { shape = shape, config = config, dtype = dtype, list = {}, weights = {} }, Decoder
  )
  self.rope = rope.from_config(config, shape.head_dim)
  local w = self.weights
  w.embed = add(self, "model.embed_tokens.weight", { shape.vocab, shape.hidden })
  w.blocks = {}
  for i = 1, shape.layers do
    w.blocks[i] = add_block(self, i)
  end
  w.norm = add(self, "model.norm.weight", { shape.hidden })
  w.head = shape.tied and w.embed or add(self, "lm_head.weight", { shape.vocab, shape.hidden })
  return self
end

-- Weights draw from streams far from those of sampled sequences and of the data.
local INIT_STREAM = 2 ^ 41

--- Random weights: matrices normal with deviation std, norms 1, biases 0. The stream of a parameter
--- is its place in the list.
---@param seed integer
---@param std number
function Decoder:init(seed, std)
  for i, p in ipairs(self.list) do
    if #p.tensor.shape == 2 then
      ops.random_normal(seed, INIT_STREAM + i, 0, std, p.tensor)
    else
      p.tensor:fill_(p.name:find("%.bias$") and 0 or 1)
    end
  end
  return self
end

-- Columns of N rows as [N, heads, D]: `count` heads behind `start` of them.
local function heads_of(x, start, count, D)
  return x:narrow(2, start * D + 1, count * D):reshape(x.shape[1], count, D)
end

-- One block. With `last` it gives [K,C]: the rows last.rows of its result alone. Their queries see
-- the keys and values of all.
local function block(self, b, x, position, cos, sin, attend, i, last)
  local s = self.shape
  local H, G, D = s.heads, s.kv_heads, s.head_dim
  local qkv = ops.linear((ops.rms_norm(x, b.attention_norm, s.eps)), b.qkv, b.qkv_bias or nil)
  local k, v = heads_of(qkv, H, G, D), heads_of(qkv, H + G, G, D)
  local of_q, q_position = qkv, position
  if last then
    x, of_q, q_position = ops.embedding(x, last.rows), ops.embedding(qkv, last.rows), last.position
  end
  local q = heads_of(of_q, 0, H, D)
  if s.qk_norm then
    q = ops.qk_norm_rope(q, b.q_norm, cos, sin, q_position, s.eps)
    k = ops.qk_norm_rope(k, b.k_norm, cos, sin, position, s.eps)
  else
    q, k = ops.rope(q, cos, sin, q_position), ops.rope(k, cos, sin, position)
  end
  local y = attend(i, q, k, v):reshape(q.shape[1], H * D)
  local normed
  x, normed = ops.add_rms_norm(ops.linear(y, b.out, b.out_bias or nil), x, b.mlp_norm, s.eps)
  local gate_up = ops.linear(normed, b.gate_up, b.gate_up_bias or nil)
  local gate, up = gate_up:narrow(2, 1, s.intermediate), gate_up:narrow(
    2, s.intermediate + 1, s.intermediate
  )
  return ops.add(x, ops.linear(ops.swiglu(gate, up), b.down, b.down_bias or nil))
end

--- The blocks and the final norm over N positions, with the caller's attention.
---@param ids liger.Tensor       [N] i32
---@param position liger.Tensor  [N] i32, from 0 in each sequence
---@param length integer         more than the largest position
---@param attend fun(layer: integer, q: liger.Tensor, k: liger.Tensor, v: liger.Tensor):
---   liger.Tensor  [N,H,D] of [N,H,D], [N,G,D] twice
---@param last? table            rows [K] i32 and their position [K] i32: only these are wanted. The
---   last layer's q and its result are then [K,H,D]
---@return liger.Tensor hidden   [N,C], or [K,C]
function Decoder:forward(ids, position, length, attend, last)
  local w = self.weights
  local cos, sin = rope.tables(self.rope, length, self.dtype == "f64" and "f64" or "f32")
  local x = ops.embedding(w.embed, ids)
  for i, b in ipairs(w.blocks) do
    local of_last = i == #w.blocks and last or nil
    if not autograd.state.recording then
      -- Nothing of a block is needed afterwards: the next one works in its memory.
      x = memory.scope(block, self, b, x, position, cos, sin, attend, i, of_last)
    elseif self.checkpointing then
      x = autograd.checkpoint(block, self, b, x, position, cos, sin, attend, i, of_last)
    else
      x = block(self, b, x, position, cos, sin, attend, i, of_last)
    end
  end
  return (ops.rms_norm(x, w.norm, self.shape.eps))
end

local function window_of(shape, i)
  return shape.windows and shape.windows[i] or 0
end

--- A layer's attention over packed sequences.
---@param i integer  the layer
---@param q liger.Tensor           [N,H,D]
---@param k liger.Tensor           [N,G,D]
---@param v liger.Tensor           [N,G,D]
---@param cu_seqlens liger.Tensor  [S+1] i32
---@return liger.Tensor [N,H,D]
function Decoder:attention(i, q, k, v, cu_seqlens)
  local s = self.shape
  local scale = s.head_dim ^ -0.5
  return (ops.attention(q, k, v, cu_seqlens, nil, scale, true, window_of(s, i), 0))
end

--- A layer's attention of one new position a sequence over its paged cache: the bits of the last
--- row of `attention`.
---@param i integer  the layer
---@param q liger.Tensor        [B,H,D]
---@param k_cache liger.Tensor  [P,G,D]
---@param v_cache liger.Tensor  [P,G,D]
---@param page liger.Tensor     [B,M] i32
---@param length liger.Tensor   [B] i32
---@param page_size integer     positions a page
---@return liger.Tensor [B,H,D]
function Decoder:attention_decode(i, q, k_cache, v_cache, page, length, page_size)
  local s = self.shape
  local scale = s.head_dim ^ -0.5
  return ops.attention_decode(
    q, k_cache, v_cache, page, length, nil, page_size, scale, window_of(s, i), 0
  )
end

--- Hidden states of packed sequences.
---@param batch table  ids [N] i32, position [N] i32, cu_seqlens [S+1] i32, max_length
---@return liger.Tensor [N,C]
function Decoder:hidden(batch)
  return self:forward(batch.ids, batch.position, batch.max_length, function(i, q, k, v)
    return self:attention(i, q, k, v, batch.cu_seqlens)
  end)
end

--- Log-probability and entropy (nats) of the batch's targets, without the [N,V] logits beyond a
--- chunk.
---@param batch table     as for hidden, and target [N] i32; with `rows` [K] i32 only those
---   positions are returned
---@param options? table  of fn.linear_logprob: temperature, logits_budget, ...
---@param hidden? liger.Tensor   [N,C] the batch's hidden states, where they are there already
---@return liger.Tensor logp     [N] (0 where the target is -100), or [K]
---@return liger.Tensor entropy  [N] or [K]
---@return liger.Tensor lse      [N] or [K]; takes no gradient
---@return liger.Tensor|nil predicted  [N] i32, of all positions, with options.predicted
function Decoder:logprob(batch, options, hidden)
  local logp, entropy, lse, predicted = fn.linear_logprob(
    hidden or self:hidden(batch), self.weights.head, batch.target, options
  )
  local rows = batch.rows
  if rows then
    return ops.gather(logp, rows), ops.gather(entropy, rows), ops.gather(lse, rows), predicted
  end
  return logp, entropy, lse, predicted
end

--- scale * sum of the cross entropy of the batch's targets, its gradients made in the same pass.
---@param batch table
---@param scale number    1 / tokens of the whole batch
---@param options? table  of fn.linear_cross_entropy: label_smoothing, z_loss, token_scaling, ...
---@return liger.Tensor loss  []
---@return table rows         loss, entropy and predicted, [N] each
function Decoder:cross_entropy(batch, scale, options)
  local o = { scale = scale }
  for key, value in pairs(options or {}) do
    o[key] = value
  end
  return fn.linear_cross_entropy(self:hidden(batch), self.weights.head, batch.target, o)
end

--- Logits of one sequence of ids (a Lua array) or of a packed batch; they take no gradient.
---@return liger.Tensor [N,V] fp32
function Decoder:logits(ids)
  local batch = ids.ids and ids or pack.sequences({ ids })
  return (ops.linear_logits(self:hidden(batch), self.weights.head, nil, 1, 0))
end

--- The trainable tensors, each with its name.
---@return liger.Parameter[]
function Decoder:parameters()
  return self.list
end

--- A frozen copy of the weights: a reference.
---@return liger.Decoder
function Decoder:copy()
  local y = M.new(self.shape, self.config, self.dtype)
  for i, p in ipairs(self.list) do
    local t = y.list[i].tensor
    t:copy_(p.tensor)
    t.edge, t.requires_grad = nil, nil
  end
  y.stop_ids = self.stop_ids
  return y
end

---@return integer
function Decoder:num_parameters()
  local n = 0
  for _, p in ipairs(self.list) do
    n = n + p.tensor:numel()
  end
  return n
end

--- Every weight under its Hugging Face name, in the list's order: { name, tensor } with views of
--- the fused matrices.
---@return { name: string, tensor: liger.Tensor }[]
function Decoder:named_weights()
  local named = {}
  for _, p in ipairs(self.list) do
    for _, part in ipairs(p.parts) do
      named[#named + 1] = {
        name = part[1], tensor = p.tensor:detach():narrow(1, part[2], part[3]), parameter = p,
        part = part,
      }
    end
  end
  return named
end

--- The gradient of the weight of a Hugging Face name, or nil.
---@param name string
---@return liger.Tensor|nil
function Decoder:grad_of(name)
  for _, p in ipairs(self.list) do
    for _, part in ipairs(p.parts) do
      if part[1] == name then
        return p.tensor.grad and p.tensor.grad:narrow(1, part[2], part[3])
      end
    end
  end
end

return M
