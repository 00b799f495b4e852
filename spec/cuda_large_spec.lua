-- Rows beyond 2^31 elements on a CUDA device: the last rows of a tensor of that size get the bits
-- that they get alone, forward and backward (B09). Runs where a CUDA device is.
local ffi = require("ffi")
local cases = require("spec.case")
local device = require("spec.device")
local helper = require("spec.helper")
local lib = require("liger.ffi")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local C = lib.C
local gpu = device.open("spec/cuda_large_spec.lua")
if not gpu then
  return
end

local ROWS = 5 -- of the small tensors: a first dimension of this size is one of rows

local function is_rows(x)
  return #x.shape > 0 and x.shape[1] == ROWS
end

-- The tensor with its rows at the end of N, the others filled with a constant.
local function enlarge(x, N)
  local rows = x.shape[1]
  local row = x:numel() / rows
  local block = C.lg_alloc(gpu, N * row * Tensor.dtype_bytes[x.dtype])
  assert(block ~= nil, "the device's memory is full")
  local raw = ffi.new("lg_tensor", x.raw)
  raw.data, raw.device, raw.shape[0] = block.data, device.index, N
  local flat = ffi.new("lg_tensor")
  flat.ndim, flat.dtype, flat.device = 1, x.raw.dtype, device.index
  flat.data, flat.shape[0], flat.stride[0] = block.data, N * row, 1
  local is_float = x.dtype == "f32" or x.dtype == "bf16"
  device.check(C.lg_fill(gpu, is_float and 0.25 or 0, flat))
  local tail = ffi.new("lg_tensor", x.raw)
  tail.device = device.index
  tail.data = ffi.cast("char *", block.data) + (N - rows) * row * Tensor.dtype_bytes[x.dtype]
  device.check(C.lg_upload(gpu, x.raw.data, tail))
  return { block = block, raw = raw, tail = tail }
end

-- Runs the op on rows beyond 2^31 elements; gives the last rows of what it wrote.
local function call_large(op, values, N)
  local args, copies, written = {}, {}, {}
  for i, p in ipairs(op.params) do
    local x = values[p.name]
    if p.tensor and x then
      copies[p.name] = is_rows(x) and enlarge(x, N) or device.copy(x)
      args[i] = copies[p.name].raw
    else
      args[i] = x
    end
  end
  device.check(C["lg_" .. op.name](gpu, unpack(args, 1, #op.params)))
  for name, copy in pairs(copies) do
    if op.tensor[name].role ~= "input" and copy.tail then
      local y = Tensor.empty(values[name].shape, values[name].dtype)
      device.check(C.lg_download(gpu, copy.tail, y.raw.data))
      written[name] = y
    end
  end
  for _, copy in pairs(copies) do
    C.lg_free(copy.block)
  end
  return written
end

local function writes_rows(op, values)
  for _, t in ipairs(op.tensors) do
    if t.role ~= "input" and values[t.name] and is_rows(values[t.name]) then
      return true
    end
  end
end

local function compare(op, values)
  local largest = 0
  for _, p in ipairs(op.params) do
    local x = p.tensor and values[p.name]
    largest = x and is_rows(x) and math.max(largest, x:numel() / ROWS) or largest
  end
  local N = math.ceil(2 ^ 31 / largest) + 2 * ROWS
  local alone, within = device.call(op, values), call_large(op, values, N)
  for name, y in pairs(within) do
    helper.same(y, alone[name], op.name .. " " .. name)
  end
end

-- ROWS rows of a few thousand elements, not a multiple of a vector where that is allowed.
local LARGE = {
  { "affine", "bf16", { N = ROWS } }, { "add", "bf16", { N = ROWS } },
  { "exp", "bf16", { N = ROWS } }, { "where", "bf16", { N = ROWS } },
  { "adamw", "bf16", { N = ROWS, step = 10 } },
  { "rms_norm", "bf16", { N = ROWS, H = 1, C = 4100 } },
  { "add_rms_norm", "bf16", { N = ROWS, C = 4100 } },
  { "layer_norm", "bf16", { N = ROWS, H = 1, C = 4100 } },
  { "swiglu", "bf16", { N = ROWS, C = 4098 } },
  { "geglu", "bf16", { N = ROWS, C = 4098, approximate = true } },
  { "rope", "bf16", { N = ROWS, H = 33, D = 128, R = 64 } },
  { "qk_norm_rope", "bf16", { N = ROWS, H = 33, D = 128, R = 64 } },
  { "embedding", "bf16", { N = ROWS, V = 30, C = 4100 } },
  { "linear", "bf16", { N = ROWS, C = 8, O = 4104 } },
  { "linear_logits", "f32", { N = ROWS, C = 8, V = 128256 } },
  { "linear_logprob", "bf16", { N = ROWS, C = 8, V = 16 } },
  { "logprob", "bf16", { N = ROWS, K = 1, V = 50257 } },
  { "cross_entropy", "bf16", { N = ROWS, V = 50257, smoothing = 0.1 } },
  { "softmax", "bf16", { N = ROWS, V = 4100 } },
  { "sample", "bf16", { B = ROWS, V = 151936 } },
  { "ce_tvd", "bf16", { N = ROWS, V = 50257 } },
  { "tvd", "bf16", { N = ROWS, V = 50264 } }, -- rows at multiples of 16 bytes
  { "jsd", "bf16", { N = ROWS, V = 50264, U = 50257, temperature = 2 } },
  { "cosine", "bf16", { N = ROWS, V = 50257 } },
  { "jsd_logp", "bf16", { N = ROWS, V = 50257 } }, { "kl_logp", "bf16", { N = ROWS, V = 50257 } },
  { "tvd_prob", "bf16", { N = ROWS, V = 50257 } },
}

-- ---- what is not made of rows alone ----

-- Calls an op with tensors on the device, by name.
local function run(name, tensors, attributes)
  local args = {}
  local op = ops.schema[name] or ops.schema[name:gsub("_backward$", "")].backward
  for i, p in ipairs(op.params) do
    local x = tensors[p.name]
    args[i] = x and x.raw or attributes[p.name]
  end
  device.check(C["lg_" .. name](gpu, unpack(args, 1, #op.params)))
end

local function free(tensors)
  for _, x in pairs(tensors) do
    C.lg_free(x.block)
  end
end

-- The last rows of a tensor of `enlarge`, or a whole copy.
local function last_rows(x, like)
  local y = Tensor.empty(like.shape, like.dtype)
  device.check(C.lg_download(gpu, x.tail or x.raw, y.raw.data))
  return y
end

local WHOLE = 64 -- tokens of a sequence
local HEADS = { H = 32, G = 8, D = 128 }
local OPTIONS = { scale = HEADS.D ^ -0.5, causal = true, window = 0, softcap = 0 }

-- Attention and its gradients of the last of many sequences.
local function attend(N)
  local cu = {}
  for i = 0, N / WHOLE do
    cu[i + 1] = i * WHOLE
  end
  local of_query, of_key = { WHOLE, HEADS.H, HEADS.D }, { WHOLE, HEADS.G, HEADS.D }
  local small = {
    q = helper.normal(1, of_query, "bf16"), k = helper.normal(2, of_key, "bf16"),
    v = helper.normal(3, of_key, "bf16"), dy = helper.normal(4, of_query, "bf16"),
    y = Tensor.empty(of_query, "bf16"), lse = Tensor.empty({ WHOLE, HEADS.H }, "f32"),
    dq = Tensor.empty(of_query, "bf16"), dk = Tensor.empty(of_key, "bf16"),
    dv = Tensor.empty(of_key, "bf16"),
  }
  local tensors = {}
  for name, x in pairs(small) do
    tensors[name] = enlarge(x, N)
  end
  tensors.cu_seqlens = device.copy(Tensor.from_table(cu, "i32"))
  run("attention", tensors, OPTIONS)
  run("attention_backward", tensors, OPTIONS)
  local written = {}
  for _, name in ipairs({ "y", "lse", "dq", "dk", "dv" }) do
    written[name] = last_rows(tensors[name], small[name])
  end
  free(tensors)
  return written
end

-- A row written to the end of a cache of N slots and read by a new position.
local function cached(N)
  local SLOTS, SIZE, LENGTH = 32, 8, 29
  local of_cache, one = { SLOTS, HEADS.G, HEADS.D }, { 1, HEADS.G, HEADS.D }
  local before = N - SLOTS
  local small = {
    k_cache = helper.normal(1, of_cache, "bf16"), v_cache = helper.normal(2, of_cache, "bf16"),
    y = Tensor.empty({ 1, HEADS.H, HEADS.D }, "bf16"):fill_(0),
  }
  local tensors = {
    k_cache = enlarge(small.k_cache, N), v_cache = enlarge(small.v_cache, N),
    k = device.copy(helper.normal(3, one, "bf16")), v = device.copy(helper.normal(4, one, "bf16")),
    slot = device.copy(Tensor.from_table({ before + LENGTH - 1 }, "i32")),
    q = device.copy(helper.normal(5, small.y.shape, "bf16")), y = device.copy(small.y),
    length = device.copy(Tensor.from_table({ LENGTH }, "i32")),
  }
  local pages = {}
  for i = 1, SLOTS / SIZE do
    pages[i] = before / SIZE + i - 1
  end
  tensors.page = device.copy(Tensor.from_table({ pages }, "i32"))
  run("cache_write", tensors, {})
  run("attention_decode", tensors, { page_size = SIZE, scale = OPTIONS.scale, window = 0,
    softcap = 0 })
  local written = {}
  for name, like in pairs(small) do
    written[name] = last_rows(tensors[name], like)
  end
  free(tensors)
  return written
end

describe("rows beyond 2^31 elements", function()
  for name, case in pairs({
    attention = { attend, WHOLE, HEADS.H }, ["a paged cache"] = { cached, 32, HEADS.G },
  }) do
    it(("of %s have the bits of a few alone"):format(name), function()
      local call, alone, heads = unpack(case)
      local N = math.ceil(2 ^ 31 / (heads * HEADS.D) / alone) * alone + 2 * alone
      local wanted = call(alone)
      for output, y in pairs(call(N)) do
        helper.same(y, wanted[output], output)
      end
    end)
  end

  for _, entry in ipairs(LARGE) do
    local name, dtype, shape = unpack(entry)
    local op, case = ops.schema[name], cases.of(name)
    it(("of %s %s have the bits of a few alone"):format(name, dtype), function()
      local inputs = cases.inputs(op, case, shape, dtype)
      local values = device.poisoned(op, inputs, dtype)
      compare(op, values)
      local backward = op.backward
      if backward then
        for out, y in pairs(device.call(op, values)) do
          values[out] = y
        end
        local of_backward = {}
        for _, p in ipairs(backward.params) do
          local base = p.name:sub(1, 1) == "d" and p.name:sub(2)
          local like = base and op.tensor[base] and values[base]
          local t = p.tensor
          if like and (t.role == "input" or (t.role == "output" and is_rows(like))) then
            local kind = cases.dtype_of(t, dtype)
            of_backward[p.name] = helper.normal(90, like.shape, kind)
          elseif not like then
            of_backward[p.name] = values[p.name]
          end
        end
        if writes_rows(backward, of_backward) then
          compare(backward, of_backward)
        end
      end
    end)
  end
end)
