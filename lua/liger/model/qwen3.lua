-- Qwen3: Llama with an RMS norm on each head's queries and keys, and layers that see only the last
-- keys.
local M = {}

-- Those layers are named by layer_types; without it they are the ones from max_window_layers on.
local function windows(c)
  local list = {}
  for i = 1, c.num_hidden_layers do
    local slides = i > (c.max_window_layers or 28)
    if c.layer_types then
      slides = c.layer_types[i] == "sliding_attention"
    end
    list[i] = c.use_sliding_window and slides and (c.sliding_window or 4096) or 0
  end
  return list
end

--- The shape of a Qwen3ForCausalLM config.
---@param c table
---@return table
function M.shape(c)
  return {
    vocab = c.vocab_size,
    hidden = c.hidden_size,
    layers = c.num_hidden_layers,
    heads = c.num_attention_heads,
    kv_heads = c.num_key_value_heads or c.num_attention_heads,
    head_dim = c.head_dim or 128,
    intermediate = c.intermediate_size,
    eps = c.rms_norm_eps or 1e-6,
    tied = c.tie_word_embeddings or false,
    qkv_bias = c.attention_bias or false,
    out_bias = c.attention_bias or false,
    mlp_bias = false,
    qk_norm = true,
    windows = windows(c),
  }
end

-- Whether use_sliding_window is a setting of this family.
M.slides = true

M.gguf_interleaved = false

return M
