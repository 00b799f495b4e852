-- Reads ops.h: every operator with its parameters, shapes and gradient. opgen.lua and ops.lua work
-- from what this returns.
local M = {}

---@class liger.Dim        one dimension of a shape line
---@field any? boolean     `*`: any leading dimensions
---@field letter? string   a size that the letter binds, plus `plus`
---@field plus? integer
---@field attr? string     the value of this attribute
---@field number? integer

---@class liger.OpTensor
---@field name string
---@field role "input"|"output"|"inplace"
---@field dims liger.Dim[]
---@field dtype string     "shared", "acc", "any" or a dtype's name
---@field optional boolean may be NULL
---@field strided boolean  `~`
---@field accumulate boolean `+`

---@class liger.OpParam
---@field name string
---@field ctype string     C type with its trailing space or star
---@field tensor? liger.OpTensor
---@field default? number|boolean  of an attribute

---@class liger.Op
---@field name string
---@field doc string
---@field line string      the shape line
---@field params liger.OpParam[]   without the context
---@field tensors liger.OpTensor[] in the order of params
---@field tensor table<string, liger.OpTensor>
---@field backward? liger.Op
---@field backward_of? liger.Op
---@field takes_f16? boolean  the dtype that its tensors share may be f16 too
---@field explicit? boolean  an output's shape cannot be inferred, so the caller passes it

--- The header without preprocessor lines, for ffi.cdef.
function M.cdef(text)
  text = text:gsub('extern "C" {', "")
  -- The closing brace of extern "C" stands between #ifdef __cplusplus and #endif.
  text = text:gsub("#ifdef __cplusplus\n.-#endif\n", "")
  return (("\n" .. text):gsub("\n#[^\n]*", "\n"))
end

local function parse_dims(text, where)
  local dims = {}
  for item in text:gmatch("[^,%s]+") do
    local letter, plus = item:match("^(%u)%+?(%d*)$")
    if item == "*" then
      dims[#dims + 1] = { any = true }
    elseif letter then
      dims[#dims + 1] = { letter = letter, plus = tonumber(plus) or 0 }
    elseif item:match("^%d+$") then
      dims[#dims + 1] = { number = tonumber(item) }
    elseif item:match("^%l[%w_]*$") then
      dims[#dims + 1] = { attr = item }
    else
      error(where .. ": cannot read dimension " .. item)
    end
  end
  return dims
end

local function parse_side(text, where, visit)
  local pattern = "(~?)([%a_][%w_]*)(%+?)(%??)(%b[]):?(%w*)"
  local rest = text:gsub(pattern, function(strided, name, plus, optional, dims, dtype)
    visit(name, {
      name = name,
      dims = parse_dims(dims:sub(2, -2), where),
      dtype = dtype == "" and "shared" or dtype,
      strided = strided ~= "",
      accumulate = plus ~= "",
      optional = optional ~= "",
    })
    return ""
  end)
  for name in rest:gmatch("%S+") do
    visit(name, nil)
  end
end

-- Defaults of attributes, taken out of the shape line: "offset=0", "round=true".
local function parse_defaults(line, where)
  local defaults = {}
  line = line:gsub("(%l[%w_]*)=(%S+)", function(name, text)
    local value = tonumber(text)
    if text == "true" or text == "false" then
      value = text == "true"
    end
    assert(value ~= nil, ("%s: cannot read default %s=%s"):format(where, name, text))
    defaults[name] = value
    return ""
  end)
  return line, defaults
end

-- The shape line: tensors by name; the right side gives outputs, and a bare name there an update in
-- place.
local function parse_line(line, where)
  local left, right = line:match("^(.-)%->(.*)$")
  assert(left, where .. ": no -> in its shape line")
  local tensors = {}
  parse_side(left, where, function(name, tensor)
    assert(tensor, where .. ": cannot read " .. name)
    tensor.role = "input"
    tensors[name] = tensor
  end)
  parse_side(right, where, function(name, tensor)
    if tensor then
      tensor.role = "output"
      tensors[name] = tensor
    else
      assert(tensors[name], where .. ": " .. name .. " has no shape")
      tensors[name].role = "inplace"
    end
  end)
  return tensors
end

-- An output's shape is known when its letters and * are bound by inputs.
local function is_explicit(op)
  local bound = {}
  for _, t in ipairs(op.tensors) do
    if t.role ~= "output" then
      for _, d in ipairs(t.dims) do
        bound[d.any and "*" or d.letter or 0] = true
      end
    end
  end
  for _, t in ipairs(op.tensors) do
    if t.role == "output" then
      for _, d in ipairs(t.dims) do
        if (d.any and not bound["*"]) or (d.letter and not bound[d.letter]) then
          return true
        end
      end
      if t.dtype == "any" then
        return true
      end
    end
  end
  return false
end

--- Parses the text of ops.h. Raises on anything that does not follow its conventions.
---@param text string
---@return liger.Op[] ops  in the header's order; also indexed by name
function M.parse(text)
  local ops = {}
  for comment, name, args in text:gmatch("/%*(.-)%*/%s*lg_status lg_([%w_]+)(%b())%s*;") do
    -- A comment may stand before another comment: only the last one belongs to the op.
    comment = comment:gsub("^.*%*/.-/%*", "")
    local doc, line = comment:match("^(.-)%*:(.*)$")
    if not doc then
      doc, line = "", assert(comment:match("^:(.*)$"), name .. ": no shape line")
    end
    line = line:gsub("\n%s*%*", " "):gsub("%s+", " "):gsub("^ ", ""):gsub(" $", "")
    doc = doc:gsub("^ ", ""):gsub("\n %*  ?", "\n"):gsub("\n%s*$", ""):gsub("%s+$", "")
    local op = { name = name, doc = doc, line = line, params = {}, tensors = {}, tensor = {} }
    local tensor_line, defaults = parse_defaults(line, name)
    local shapes = parse_line(tensor_line, name)
    for arg in args:sub(2, -2):gsub("%s+", " "):gmatch("[^,]+") do
      local ctype, param = arg:match("^%s*(.-)([%w_]+)%s*$")
      if ctype ~= "lg_context *" then
        local p = { name = param, ctype = ctype }
        if ctype:match("lg_tensor") then
          p.tensor = assert(shapes[param], name .. ": " .. param .. " is not in its shape line")
          shapes[param] = nil
          local is_const = ctype:match("^const") ~= nil
          assert(
            is_const == (p.tensor.role == "input"),
            name .. ": const of " .. param .. " disagrees with its shape line"
          )
          if p.tensor.dtype == "float" then
            p.tensor.dtype, op.takes_f16 = "shared", true
          end
          op.tensors[#op.tensors + 1] = p.tensor
          op.tensor[param] = p.tensor
        else
          p.default, defaults[param] = defaults[param], nil
        end
        op.params[#op.params + 1] = p
      end
    end
    assert(
      not next(shapes), name .. ": its shape line names no parameter: " .. tostring(next(shapes))
    )
    assert(not next(defaults), name .. ": no attribute is named " .. tostring(next(defaults)))
    local base = name:match("^(.*)_backward$")
    if base then
      op.backward_of = assert(ops[base], name .. ": its forward is not declared before it")
      ops[base].backward = op
      for _, t in ipairs(op.tensors) do
        t.optional = t.optional or t.role == "output"
      end
    else
      op.explicit = is_explicit(op)
      for _, p in ipairs(op.params) do
        assert(
          not (p.name:sub(1, 1) == "d" and op.tensor[p.name:sub(2)]),
          name .. ": " .. p.name .. " reads as the gradient of " .. p.name:sub(2)
        )
      end
    end
    ops[#ops + 1] = op
    ops[name] = op
  end
  return ops
end

return M
