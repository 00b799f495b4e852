-- Qwen3: Llama with an RMS norm on each head's queries and keys.
local M = {}

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
  }
end

M.gguf_interleaved = false

return M
