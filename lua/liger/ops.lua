-- One function an operator, made from ops.h as straight-line Lua at load: `ops.linear(x, w, b)`
-- takes inputs and attributes in the header's order (nil: the default, where there is one) and
-- gives new outputs; `ops.raw.linear(...)` takes every C parameter, outputs too (nil: not wanted),
-- and records nothing. Differentiable ops record themselves on the tape of autograd.lua.
local abi = require("abi")
local autograd = require("liger.autograd")
local gradient = require("liger.gradient")
local lib = require("liger.ffi")
local schema = require("liger.schema")
local Tensor = require("liger.tensor")

local M = { raw = {} }

local list = schema.parse(abi.ops)
M.schema = list

-- ---- arguments ----

local function bad_tensor(op, name, value)
  local got = type(value)
  if got == "number" or got == "string" then
    got = ("%s %s"):format(got, value)
  end
  lib.raise(("%s: %s is %s, wanted a tensor"):format(op, name, got))
end

local function dead_tensor(op, name)
  lib.raise(
    (
      "%s: %s is used after its scope ended; return it from the scope or call keep()"
    ):format(op, name)
  )
end

local function bad_attribute(op, name, value, wanted)
  lib.raise(("%s: %s is %s, wanted %s"):format(op, name, tostring(value), wanted))
end

--- Raises for the first argument past the last one that a function takes.
---@param op string
---@param index integer  its number
---@param last string    the name of the last one
function M.refuse_extra(op, index, value, last)
  lib.raise(
    ("%s: argument %d is %s, wanted none after %s"):format(op, index, tostring(value), last)
  )
end

local function lead(shape, trailing)
  local y = {}
  for i = 1, #shape - trailing do
    y[i] = shape[i]
  end
  return y
end

-- ---- code ----

local function emit_argument(out, op, p, raw)
  local name = p.name
  if p.default ~= nil and not raw then
    out(("  if %s == nil then %s = %s end"):format(name, name, tostring(p.default)))
  end
  if p.tensor then
    local optional = p.tensor.optional
    out(("  local %s_raw"):format(name))
    if optional then
      out(("  if %s ~= nil then"):format(name))
    end
    out(
      ('  if type(%s) ~= "table" or not %s.raw then bad_tensor("%s", "%s", %s) end'):format(
        name, name, op.name, name, name
      )
    )
    out(('  if %s.storage.dead then dead_tensor("%s", "%s") end'):format(name, op.name, name))
    out(("  if %s.host then %s:upload() end"):format(name, name))
    if p.tensor.role ~= "input" then
      out(("  %s.storage.mirror = nil"):format(name))
    end
    out(("  %s_raw = %s.raw"):format(name, name))
    if optional then
      out("  end")
    end
  elseif p.ctype:match("bool") then
    out(
      ('  if type(%s) ~= "boolean" then bad_attribute("%s", "%s", %s, "true or false") end'):format(
        name, op.name, name, name
      )
    )
  elseif p.ctype:match("int64_t") then
    out(
      (
        '  if type(%s) ~= "number" or %s %% 1 ~= 0 then '
          .. 'bad_attribute("%s", "%s", %s, "a whole number") end'
      ):format(
        name, name, op.name, name, name
      )
    )
  else
    out(
      ('  if type(%s) ~= "number" then bad_attribute("%s", "%s", %s, "a number") end'):format(
        name, op.name, name, name
      )
    )
  end
end

local function c_arguments(op)
  local args = {}
  for _, p in ipairs(op.params) do
    args[#args + 1] = p.tensor and p.name .. "_raw" or p.name
  end
  return table.concat(args, ", ")
end

-- Where a letter's size or the leading dimensions are read from.
local function emit_sizes(out, op)
  local seen = {}
  for _, t in ipairs(op.tensors) do
    if t.role ~= "output" and not t.optional then
      local any = t.dims[1] and t.dims[1].any
      for i, d in ipairs(t.dims) do
        if d.letter and not seen[d.letter] then
          seen[d.letter] = true
          local index = any and ("#%s.shape - %d"):format(t.name, #t.dims - i) or tostring(i)
          out(
            ("  local %s = max((%s.shape[%s] or 0) - %d, 0)"):format(
              d.letter, t.name, index, d.plus
            )
          )
        elseif d.any and not seen["*"] then
          seen["*"] = true
          out(("  local leading, trailing = %s.shape, %d"):format(t.name, #t.dims - 1))
          if #t.dims == 1 then
            seen.whole = true
          end
        end
      end
    end
  end
  return seen
end

local function emit_shared_dtype(out, op)
  for _, t in ipairs(op.tensors) do
    if t.role ~= "output" and t.dtype == "shared" then
      out(("  local shared = %s.dtype"):format(t.name))
      return
    end
  end
end

local function dtype_text(t)
  if t.dtype == "shared" then
    return "shared"
  elseif t.dtype == "acc" then
    return '(shared == "f64" and "f64" or "f32")'
  end
  return '"' .. t.dtype .. '"'
end

local function emit_output(out, t, whole)
  local shape
  if t.dims[1] and t.dims[1].any then
    if #t.dims == 1 and whole then
      shape = "leading"
    else
      out(("  local %s_shape = lead(leading, trailing)"):format(t.name))
      for i = 2, #t.dims do
        out(("  %s_shape[#%s_shape + 1] = %s"):format(t.name, t.name, t.dims[i].letter))
      end
      shape = t.name .. "_shape"
    end
  else
    local sizes = {}
    for _, d in ipairs(t.dims) do
      sizes[#sizes + 1] = d.number or d.letter .. " + " .. d.plus
    end
    shape = "{ " .. table.concat(sizes, ", ") .. " }"
  end
  out(("  local %s = empty(%s, %s)"):format(t.name, shape, dtype_text(t)))
  out(("  local %s_raw = %s.raw"):format(t.name, t.name))
end

-- Forward inputs and outputs that have a gradient, and forward names that the backward mentions.
local function calculus(op)
  local back = op.backward
  local info = { inputs = {}, outputs = {}, saved = {} }
  for _, t in ipairs(op.tensors) do
    local d = back.tensor["d" .. t.name]
    if d and t.role == "input" then
      info.inputs[#info.inputs + 1] = t.name
    elseif d and t.role == "output" then
      info.outputs[#info.outputs + 1] = t.name
    end
  end
  for _, p in ipairs(back.params) do
    local is_gradient = p.name:sub(1, 1) == "d" and op.tensor[p.name:sub(2)]
    if not is_gradient then
      info.saved[#info.saved + 1] = p.name
    end
  end
  return info
end

local function emit_record(out, op)
  local info = calculus(op)
  local any = {}
  for _, name in ipairs(info.inputs) do
    any[#any + 1] = op.tensor[name].optional and ("(%s and %s.edge)"):format(name, name)
      or name .. ".edge"
  end
  out(("  if state.recording and (%s) then"):format(table.concat(any, " or ")))
  local edges = {}
  for i, text in ipairs(any) do
    edges[i] = text .. " or false"
  end
  out(("    local node = new_node(backward, { %s })"):format(table.concat(edges, ", ")))
  for _, name in ipairs(info.saved) do
    out(("    node.%s = %s"):format(name, name))
  end
  for _, name in ipairs(info.outputs) do
    out(("    node.out_%s = new_edge(node, %s)"):format(name, name))
  end
  out("  end")
end

local PRELUDE = "local lg, ctx, check, empty, lead, state, new_node, new_edge, backward, "
  .. "bad_tensor, dead_tensor, bad_attribute, refuse_extra, to_write = ...\n"
  .. "local max = math.max\n"

local function forward_source(op, raw)
  local lines = {}
  local function out(line)
    lines[#lines + 1] = line
  end
  local args, returns = {}, {}
  for _, p in ipairs(op.params) do
    if raw or op.explicit or not p.tensor or p.tensor.role ~= "output" then
      args[#args + 1] = p.name
    end
  end
  out(PRELUDE .. ("return function(%s, extra_)"):format(table.concat(args, ", ")))
  out(
    ('  if extra_ ~= nil then refuse_extra("%s", %d, extra_, "%s") end'):format(
      op.name, #args + 1, args[#args]
    )
  )
  for _, p in ipairs(op.params) do
    if raw and p.tensor and p.tensor.role == "output" then
      out(("  local %s_raw = %s and to_write(%s)"):format(p.name, p.name, p.name))
    elseif raw or op.explicit or not p.tensor or p.tensor.role ~= "output" then
      emit_argument(out, op, p, raw)
    end
  end
  if not raw and not op.explicit then
    local seen = emit_sizes(out, op)
    emit_shared_dtype(out, op)
    for _, t in ipairs(op.tensors) do
      if t.role == "output" and not t.optional then
        emit_output(out, t, seen.whole)
        returns[#returns + 1] = t.name
      elseif t.role == "output" then
        out(("  local %s, %s_raw"):format(t.name, t.name))
      end
    end
  end
  out(("  check(lg.lg_%s(ctx, %s))"):format(op.name, c_arguments(op)))
  if op.backward and not raw then
    emit_record(out, op)
  end
  out("  return " .. table.concat(returns, ", "))
  out("end")
  return table.concat(lines, "\n")
end

local BACKWARD_PRELUDE = "local lg, ctx, check, incoming, dest, sum_dest, settle, "
  .. "dead_tensor = ...\n"

local function backward_source(op)
  local back, info = op.backward, calculus(op)
  local lines = { BACKWARD_PRELUDE .. "return function(node)" }
  local function out(line)
    lines[#lines + 1] = line
  end
  for _, name in ipairs(info.outputs) do
    local optional = back.tensor["d" .. name].optional
    out(("  local d%s = incoming(node.out_%s, %s)"):format(name, name, tostring(not optional)))
  end
  for i, name in ipairs(info.inputs) do
    local t = back.tensor["d" .. name]
    out(("  local d%s, d%s_add = %s(node[%d], %s)"):format(
      name, name, t.accumulate and "sum_dest" or "dest", i, tostring(t.strided)
    ))
  end
  local args = {}
  for _, name in ipairs(info.saved) do
    if back.tensor[name] then
      out(
        ('  if node.%s and node.%s.storage.dead then dead_tensor("%s", "%s") end'):format(
          name, name, back.name, name
        )
      )
    end
  end
  for _, p in ipairs(back.params) do
    local base = p.name:sub(2)
    if p.tensor and p.name:sub(1, 1) == "d" and op.tensor[base] then
      args[#args + 1] = ("d%s and d%s.raw"):format(base, base)
    elseif p.tensor then
      args[#args + 1] = ("node.%s and node.%s.raw"):format(p.name, p.name)
    else
      args[#args + 1] = "node." .. p.name
    end
  end
  out(("  check(lg.lg_%s(ctx, %s))"):format(back.name, table.concat(args, ", ")))
  for i, name in ipairs(info.inputs) do
    out(("  if d%s_add then settle(node[%d], d%s) end"):format(name, i, name))
  end
  out("end")
  return table.concat(lines, "\n")
end

local function compile(source, name, ...)
  local chunk = assert(loadstring(source, "=ops." .. name))
  return chunk(...)
end

for _, op in ipairs(list) do
  local backward
  if op.backward then
    backward = compile(
      backward_source(op),
      op.backward.name,
      lib.C,
      lib.ctx,
      lib.check,
      gradient.incoming,
      gradient.dest,
      gradient.sum_dest,
      gradient.settle,
      dead_tensor
    )
    local rule = autograd.rules[op.name]
    if rule then
      backward = function(node)
        rule(node, M.raw)
      end
    end
  end
  local function build(raw)
    return compile(
      forward_source(op, raw),
      op.name,
      lib.C,
      lib.ctx,
      lib.check,
      Tensor.empty,
      lead,
      autograd.state,
      autograd.new_node,
      autograd.new_edge,
      backward,
      bad_tensor,
      dead_tensor,
      bad_attribute,
      M.refuse_extra,
      Tensor.to_write
    )
  end
  M.raw[op.name] = build(true)
  if not op.backward_of then
    M[op.name] = build(false)
  end
end

return M
