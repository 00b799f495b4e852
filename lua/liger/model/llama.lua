-- Llama and SmolLM: a Hugging Face config becomes a decoder's shape.
local M = {}

--- The shape of a LlamaForCausalLM config.
---@param c table
---@return table
function M.shape(c)
  return {
    vocab = c.vocab_size,
    hidden = c.hidden_size,
    layers = c.num_hidden_layers,
    heads = c.num_attention_heads,
    kv_heads = c.num_key_value_heads or c.num_attention_heads,
    head_dim = c.head_dim or c.hidden_size / c.num_attention_heads,
    intermediate = c.intermediate_size,
    eps = c.rms_norm_eps or 1e-6,
    tied = c.tie_word_embeddings or false,
    qkv_bias = c.attention_bias or false,
    out_bias = c.attention_bias or false,
    mlp_bias = c.mlp_bias or false,
    qk_norm = false,
  }
end

-- GGUF stores Llama's q and k with the rows of a head interleaved for the other rotation.
M.gguf_interleaved = true
M.slides = false

return M
