-- GGUF: its metadata as a Hugging Face config, its tensor names, and its order of rows.
local fail = require("liger.file").fail
local Tensor = require("liger.tensor")

local M = {}

-- Settings that would change the result if they were passed over.
local function check_unread(meta, arch, head_dim, path)
  local function refuse(key, wanted)
    fail(
      path, "%s is %s, wanted %s; use the safetensors folder", key, tostring(meta[key]), wanted
    )
  end
  local keys = {}
  for key in pairs(meta) do
    keys[#keys + 1] = key
  end
  table.sort(keys)
  for _, key in ipairs(keys) do
    local name = key:sub(1, #arch + 1) == arch .. "." and key:sub(#arch + 2) or ""
    local value = meta[key]
    if name:find("^rope%.scaling%.") or name == "rope.scale_linear" then
      if value ~= "none" and value ~= 1 and value ~= 0 and value ~= false then
        refuse(key, "no scaled rope")
      end
    elseif name == "attention.sliding_window" and value ~= 0 then
      refuse(key, "no sliding window")
    elseif (name == "rope.dimension_count" or name == "attention.value_length")
      and value ~= head_dim then
      refuse(key, ("the head's %d"):format(head_dim))
    end
  end
end

--- The config that a GGUF file's metadata describes.
---@param meta table  the key-value pairs
---@param index table tensors by name
---@param path string for messages
---@return table config
function M.config(meta, index, path)
  local arch = meta["general.architecture"]
  local function get(key, default)
    local value = meta[("%s.%s"):format(arch, key)]
    if value == nil then
      value = default
    end
    if value == nil then
      fail(path, "metadata has no %s.%s", tostring(arch), key)
    end
    return value
  end
  if arch ~= "llama" and arch ~= "qwen3" then
    fail(path, "architecture is %s, wanted llama or qwen3", tostring(arch))
  end
  if index["rope_freqs.weight"] then
    fail(path, "rope_freqs.weight: scaled rope from GGUF is not read; use the safetensors folder")
  end
  local embed = index["token_embd.weight"]
  if not embed then
    fail(path, "tensor token_embd.weight is missing")
  end
  local hidden, heads = get("embedding_length"), get("attention.head_count")
  local head_dim = get("attention.key_length", hidden / heads)
  check_unread(meta, arch, head_dim, path)
  return {
    model_type = arch,
    architectures = { arch == "llama" and "LlamaForCausalLM" or "Qwen3ForCausalLM" },
    vocab_size = embed.shape[1],
    hidden_size = hidden,
    num_hidden_layers = get("block_count"),
    num_attention_heads = heads,
    num_key_value_heads = get("attention.head_count_kv", heads),
    head_dim = head_dim,
    intermediate_size = get("feed_forward_length"),
    rms_norm_eps = get("attention.layer_norm_rms_epsilon"),
    rope_theta = get("rope.freq_base", 10000),
    max_position_embeddings = get("context_length"),
    tie_word_embeddings = index["output.weight"] == nil,
    hidden_act = "silu",
    bos_token_id = meta["tokenizer.ggml.bos_token_id"],
    eos_token_id = meta["tokenizer.ggml.eos_token_id"],
    pad_token_id = meta["tokenizer.ggml.padding_token_id"],
  }
end

local TOP = {
  ["model.embed_tokens"] = "token_embd",
  ["model.norm"] = "output_norm",
  ["lm_head"] = "output",
}

local BLOCK = {
  ["input_layernorm"] = "attn_norm",
  ["post_attention_layernorm"] = "ffn_norm",
  ["self_attn.q_proj"] = "attn_q",
  ["self_attn.k_proj"] = "attn_k",
  ["self_attn.v_proj"] = "attn_v",
  ["self_attn.o_proj"] = "attn_output",
  ["self_attn.q_norm"] = "attn_q_norm",
  ["self_attn.k_norm"] = "attn_k_norm",
  ["mlp.gate_proj"] = "ffn_gate",
  ["mlp.up_proj"] = "ffn_up",
  ["mlp.down_proj"] = "ffn_down",
}

--- "model.layers.3.self_attn.q_proj.weight" -> "blk.3.attn_q.weight"
---@param name string
---@return string
function M.name(name)
  local layer, inner, kind = name:match("^model%.layers%.(%d+)%.(.+)%.(%w+)$")
  if layer then
    return ("blk.%s.%s.%s"):format(layer, BLOCK[inner], kind)
  end
  local outer
  outer, kind = name:match("^(.+)%.(%w+)$")
  return ("%s.%s"):format(TOP[outer], kind)
end

--- Brings the rows of q and k from pairs (2i, 2i + 1) back to halves (i, i + D/2), for
--- architectures that GGUF interleaves.
---@param shape table  the decoder's shape
---@return fun(name: string, y: liger.Tensor)
function M.deinterleave(shape)
  return function(name, y)
    local which = name:match("self_attn%.([qk])_proj%.")
    if not which then
      return
    end
    local heads = which == "q" and shape.heads or shape.kv_heads
    local half = shape.head_dim / 2
    local source = Tensor.empty(y.shape, y.dtype):copy_(y)
    for h = 0, heads - 1 do
      for j = 0, 1 do
        for i = 0, half - 1 do
          local to, from = h * 2 * half + j * half + i, h * 2 * half + 2 * i + j
          y:narrow(1, to + 1, 1):copy_(source:narrow(1, from + 1, 1))
        end
      end
    end
  end
end

return M
