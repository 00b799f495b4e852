-- Build step: reads the headers, writes what follows from the op table.
--   luajit src/opgen.lua liger.h comm.h ops.h OUT
-- OUT/backend.h   the backend's table of functions and the prototypes that backends implement
-- OUT/op/NAME.h   the prototypes of op NAME's kernels and its gradient's
-- OUT/cuda_table.c the CUDA backend's table
-- OUT/dispatch.c  the checked public entry of each op, the CPU table, the hash of the headers
-- OUT/abi.lua     the text for ffi.cdef, the hash, the ops' schema text
-- OUT/ops.meta.lua, OUT/ops.md   editor stubs and the op reference
package.path = arg[0]:gsub("opgen%.lua$", "") .. "../lua/?.lua;" .. package.path
local schema = require("liger.schema")

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

-- Files that did not change keep their time stamp, so that nothing is rebuilt for them.
local function write(path, text)
  local old = io.open(path, "rb")
  if old then
    local same = old:read("*a") == text
    old:close()
    if same then
      return
    end
  end
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

-- FNV-1a on 64 bits, as 16 hex digits.
local function hash(text)
  local value = 0xcbf29ce484222325ULL
  for i = 1, #text do
    value = require("bit").bxor(value, text:byte(i)) * 0x100000001b3ULL
  end
  return (require("bit").tohex(value, 16))
end

local liger_h, comm_h, ops_h, out = read(arg[1]), read(arg[2]), read(arg[3]), arg[4]
local ops = schema.parse(ops_h)
local cdef = schema.cdef(liger_h) .. schema.cdef(comm_h) .. schema.cdef(ops_h)
local abi_hash = hash(cdef)

local function params(op, with_names)
  local list = { with_names and "lg_context *ctx" or "lg_context *" }
  for _, p in ipairs(op.params) do
    list[#list + 1] = with_names and (p.ctype .. p.name) or p.ctype
  end
  return table.concat(list, ", ")
end

local function names(op)
  local list = { "ctx" }
  for _, p in ipairs(op.params) do
    list[#list + 1] = p.name
  end
  return table.concat(list, ", ")
end

local backend = {
  "/* Made by opgen.lua from ops.h: what a backend implements. */",
  "#ifndef LIGER_BACKEND_H\n#define LIGER_BACKEND_H\n",
  '#include "liger.h"\n',
  '#ifdef __cplusplus\nextern "C" {\n#endif\n',
  "typedef struct lg_backend {\n    const char *name;",
}
for _, op in ipairs(ops) do
  backend[#backend + 1] = ("    lg_status (*%s)(%s);"):format(op.name, params(op, false))
end
backend[#backend + 1] = "} lg_backend;\n"
for _, prefix in ipairs({ "cpu", "cuda" }) do
  for _, op in ipairs(ops) do
    backend[#backend + 1] = ("lg_status %s_%s(%s);"):format(prefix, op.name, params(op, true))
  end
end
backend[#backend + 1] = "\n#ifdef __cplusplus\n}\n#endif\n#endif\n"
write(out .. "/backend.h", table.concat(backend, "\n"))

-- A kernel file includes its own ops' alone, so that a new op compiles no other kernel again.
for _, op in ipairs(ops) do
  if not op.backward_of then
    local list = {
      "/* Made by opgen.lua from ops.h. */",
      '#include "liger.h"\n',
      '#ifdef __cplusplus\nextern "C" {\n#endif',
      ("lg_status cuda_%s(%s);"):format(op.name, params(op, true)),
    }
    if op.backward then
      local back = op.backward
      list[#list + 1] = ("lg_status cuda_%s(%s);"):format(back.name, params(back, true))
    end
    list[#list + 1] = "#ifdef __cplusplus\n}\n#endif\n"
    write(("%s/op/%s.h"):format(out, op.name), table.concat(list, "\n"))
  end
end

local dispatch = {
  "/* Made by opgen.lua from ops.h: the checked public entry of each op. */",
  '#include "backend.h"\n#include "check.h"\n#include "internal.h"\n#include "ops.h"\n',
}
for _, op in ipairs(ops) do
  dispatch[#dispatch + 1] = ("__attribute__((weak)) lg_status cpu_%s(%s);"):format(
    op.name,
    params(op, true)
  )
end
for _, op in ipairs(ops) do
  local args, tensors, attrs = {}, {}, {}
  for _, t in ipairs(op.tensors) do
    local dims = {}
    for _, d in ipairs(t.dims) do
      if d.attr then
        attrs[#attrs + 1] = d.attr
        dims[#dims + 1] = ("{.kind = LG_DIM_ATTR, .letter = %d}"):format(#attrs - 1)
      elseif d.any then
        dims[#dims + 1] = "{.kind = LG_DIM_ANY}"
      elseif d.number then
        dims[#dims + 1] = ("{.kind = LG_DIM_NUMBER, .plus = %d}"):format(d.number)
      else
        dims[#dims + 1] = ("{.kind = LG_DIM_LETTER, .letter = '%s', .plus = %d}"):format(
          d.letter,
          d.plus
        )
      end
    end
    args[#args + 1] = ('        {"%s", LG_DTYPE_%s, %s, %s, %d, {%s}},'):format(
      t.name,
      t.dtype == "shared" and op.takes_f16 and "FLOAT" or t.dtype:upper(),
      t.optional and "true" or "false",
      t.strided and "true" or "false",
      #t.dims,
      #dims > 0 and table.concat(dims, ", ") or "{0}"
    )
    tensors[#tensors + 1] = t.name
  end
  local body = {
    ("lg_status lg_%s(%s) {"):format(op.name, params(op, true)),
    "    static const lg_arg args[] = {",
    table.concat(args, "\n"),
    "    };",
    ("    const lg_tensor *const tensors[] = {%s};"):format(table.concat(tensors, ", ")),
    #attrs > 0 and ("    const int64_t attrs[] = {%s};"):format(table.concat(attrs, ", "))
      or "    const int64_t *attrs = NULL;",
    ('    LG_TRY(lg_check(ctx, "%s", args, %d, tensors, attrs));'):format(op.name, #tensors),
    ('    if (!lg_context_backend(ctx)->%s) return lg_check_missing(ctx, "%s");'):format(
      op.name,
      op.name
    ),
    ("    lg_status status = lg_context_backend(ctx)->%s(%s);"):format(op.name, names(op)),
    "    lg_scratch_end(ctx);",
    "    return status;",
    "}\n",
  }
  dispatch[#dispatch + 1] = table.concat(body, "\n")
end
dispatch[#dispatch + 1] = "static const lg_backend cpu_backend = {\n    .name = \"cpu\","
for _, op in ipairs(ops) do
  dispatch[#dispatch + 1] = ("    .%s = cpu_%s,"):format(op.name, op.name)
end
dispatch[#dispatch + 1] = "};\n"
dispatch[#dispatch + 1] = "const lg_backend *lg_cpu_backend(void) {\n    return &cpu_backend;\n}\n"
dispatch[#dispatch + 1] = (
  "uint64_t lg_abi_hash(void) {\n    return 0x%sull;\n}\n"
):format(abi_hash)
write(out .. "/dispatch.c", table.concat(dispatch, "\n"))

-- An operator that has no kernel yet is a weak symbol, and so NULL in the table.
local cuda = {
  "/* Made by opgen.lua from ops.h: the CUDA backend's table. */", '#include "backend.h"\n',
}
for _, op in ipairs(ops) do
  cuda[#cuda + 1] = ("__attribute__((weak)) lg_status cuda_%s(%s);"):format(
    op.name, params(op, true)
  )
end
cuda[#cuda + 1] = "\nextern const lg_backend lg_cuda_table;"
cuda[#cuda + 1] = "const lg_backend lg_cuda_table = {\n    .name = \"cuda\","
for _, op in ipairs(ops) do
  cuda[#cuda + 1] = ("    .%s = cuda_%s,"):format(op.name, op.name)
end
cuda[#cuda + 1] = "};\n"
write(out .. "/cuda_table.c", table.concat(cuda, "\n"))

write(
  out .. "/abi.lua",
  (
    "-- Made by opgen.lua from the headers.\nreturn {\n  hash = 0x%sULL,\n"
      .. "  cdef = [==[\n%s]==],\n  ops = [==[\n%s]==],\n}\n"
  ):format(
    abi_hash,
    cdef,
    ops_h
  )
)

local function shape_text(t)
  local list = {}
  for _, d in ipairs(t.dims) do
    list[#list + 1] = d.any and "*" or d.attr or d.number or (
      d.letter .. (d.plus > 0 and "+" .. d.plus or "")
    )
  end
  return "[" .. table.concat(list, ",") .. "]"
end

local meta = {
  "---@meta\n-- Made by opgen.lua from ops.h: editor stubs of liger.ops.\n", "local ops = {}\n",
}
local reference = { "# Operators\n\nMade from `src/ops.h` by `src/opgen.lua`.\n" }
for _, op in ipairs(ops) do
  if not op.backward_of then
    local doc, lua = {}, {}
    for line in (op.doc .. "\n"):gmatch("(.-)\n") do
      doc[#doc + 1] = "--- " .. line
    end
    local args, returns = {}, {}
    for _, p in ipairs(op.params) do
      local t = p.tensor
      if t and (t.role == "input" or t.role == "inplace" or op.explicit) then
        args[#args + 1] = p.name
        lua[#lua + 1] = ("---@param %s%s liger.Tensor  %s%s"):format(
          p.name,
          t.optional and "?" or "",
          shape_text(t),
          t.dtype ~= "shared" and " " .. t.dtype or ""
        )
      elseif not t then
        args[#args + 1] = p.name
        local kind = p.ctype:match("bool") and "boolean" or "number"
        lua[#lua + 1] = p.default == nil and ("---@param %s %s"):format(p.name, kind)
          or ("---@param %s? %s  default %s"):format(p.name, kind, tostring(p.default))
      end
    end
    for _, t in ipairs(op.tensors) do
      if t.role == "output" and not t.optional and not op.explicit then
        returns[#returns + 1] = ("---@return liger.Tensor %s  %s"):format(t.name, shape_text(t))
      end
    end
    meta[#meta + 1] = table.concat(doc, "\n")
      .. "\n"
      .. table.concat(lua, "\n")
      .. (#returns > 0 and "\n" .. table.concat(returns, "\n") or "")
      .. ("\nfunction ops.%s(%s) end\n"):format(op.name, table.concat(args, ", "))
    reference[#reference + 1] = ("## %s\n\n    %s(%s)\n    %s\n\n%s\n%s"):format(
      op.name,
      op.name,
      table.concat(args, ", "),
      op.line,
      op.doc,
      op.backward and ("\nGradient: `%s`\n"):format(op.backward.line) or "\nNo gradient.\n"
    )
  end
end
meta[#meta + 1] = "return ops\n"
write(out .. "/ops.meta.lua", table.concat(meta, "\n"))
write(out .. "/ops.md", table.concat(reference, "\n"))
