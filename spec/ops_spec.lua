-- Every operator of ops.h on every size of its case: gradients, precisions, bits, refusals.
local helper = require("spec.helper")
local cases = require("spec.case")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local close, raises, same = helper.close, helper.raises, helper.same

-- Largest difference to f64 over the tensor's largest magnitude. bf16 has 8 bits: half of 2^-8 for
-- one rounding, twice in rms_norm; f16 has 11.
local VALUE = { f32 = 1e-5, bf16 = 1e-2, f16 = 1.5e-3 }
local GRADIENT = { f32 = 1e-4, bf16 = 2e-2, f16 = 3e-3 }
-- Of a bf16 or f16 run the fp32 outputs that no such number goes into.
local KEPT = 1e-4

local function outputs_of(op, values)
  local list = {}
  for _, t in ipairs(op.tensors) do
    if t.role ~= "input" and values[t.name] then
      list[#list + 1] = t
    end
  end
  return list
end

local function same_outputs(op, a, b, what)
  for _, t in ipairs(outputs_of(op, b)) do
    same(a[t.name], b[t.name], what .. ", " .. t.name)
  end
end

local function same_gradients(a, b, what)
  for name, gradient in pairs(b) do
    same(a[name], gradient, ("%s, d%s"):format(what, name))
  end
end

-- ---- values and gradients ----

-- The gradients of one set of inputs, in f64, by central differences: of all outputs at once, and
-- of each input alone.
local function check_gradients(op, inputs)
  local names = cases.differentiable(op)
  local values = cases.forward(op, inputs, "f64")
  local up = cases.upstream(op, values, "f64")
  local function loss()
    local now, total = cases.forward(op, inputs, "f64"), 0
    for name, dy in pairs(up) do
      local a, b = now[name]:data(), dy:data()
      for i = 0, dy:numel() - 1 do
        total = total + a[i] * b[i]
      end
    end
    return total
  end
  local together = cases.backward(op, values, up, names, "f64")
  for _, name in ipairs(names) do
    if inputs[name] then
      helper.check_gradient(loss, inputs[name], together[name], 1e-6, "d" .. name)
      same_gradients(together, cases.backward(op, values, up, { name }, "f64"), "alone")
    end
  end
  -- Every output that can go without: its gradient and what is kept for it.
  local dropped = {}
  for _, t in ipairs(op.backward.tensors) do
    if t.optional and (t.role == "inplace" or up[t.name:sub(2)]) and t.name:sub(1, 1) ~= "b" then
      dropped[t.name] = true
      if up[t.name:sub(2)] then
        local old = up[t.name:sub(2)]
        up[t.name:sub(2)] = nil
        local less = cases.backward(op, values, up, names, "f64")
        for _, name in ipairs(names) do
          if inputs[name] then
            helper.check_gradient(loss, inputs[name], less[name], 1e-6,
              ("d%s without %s"):format(name, t.name))
          end
        end
        up[t.name:sub(2)] = old
      end
    end
  end
  if next(dropped) then
    local without = {}
    for name in pairs(dropped) do
      if not up[name:sub(2)] then
        without[name] = true
      end
    end
    local again = cases.backward(op, values, up, names, "f64", { without = without })
    for name, gradient in pairs(again) do
      close(gradient, together[name], 1e-12, "d" .. name .. " recomputed")
    end
  end
  -- Sums go on from what is there.
  for name, gradient in pairs(cases.backward(op, values, up, names, "f64", { start = 3 })) do
    if op.backward.tensor["d" .. name].accumulate then
      close(gradient, ops.affine(together[name], 1, 3), 1e-12, "d" .. name .. " added to 3")
    end
  end
end

-- The inputs with each optional one left out, besides themselves.
local function variants(op, inputs)
  local list = { inputs }
  for _, t in ipairs(op.tensors) do
    if t.role == "input" and t.optional and inputs[t.name] then
      local less = {}
      for name, x in pairs(inputs) do
        if name ~= t.name then
          less[name] = x
        end
      end
      list[#list + 1] = less
    end
  end
  return list
end

local function agree(op, case, shape, dtype)
  local got_in = cases.inputs(op, case, shape, dtype)
  local want_in = cases.inputs(op, case, shape, "f64", dtype)
  local got, want = cases.forward(op, got_in, dtype), cases.forward(op, want_in, "f64")
  for _, t in ipairs(outputs_of(op, want)) do
    local y = got[t.name]
    local bound = y.dtype == dtype and VALUE[dtype] or dtype == "f32" and VALUE.f32 or KEPT
    close(y, want[t.name], bound, t.name)
  end
  if not op.backward then
    return
  end
  local names = cases.differentiable(op)
  local up = cases.upstream(op, want, "f64")
  local up_got = {}
  for name, dy in pairs(up) do
    up_got[name] = helper.to(dy, got[name].dtype)
    up[name] = helper.to(up_got[name], "f64")
  end
  -- Sums go on from what is there.
  local wanted = cases.backward(op, want, up, names, "f64", { start = 1 })
  for name, gradient in pairs(cases.backward(op, got, up_got, names, dtype, { start = 1 })) do
    -- A gradient may be nothing but rounding: that of one key's score is 0.
    close(gradient, wanted[name], GRADIENT[dtype], "d" .. name, 1e-2)
  end
end

local function same_bits(op, case, shape, dtype)
  local first, first_gradients
  helper.with_threads({ 1, 1, 2, 3 }, function(threads)
    local inputs = cases.inputs(op, case, shape, dtype)
    local values = cases.forward(op, inputs, dtype)
    local gradients = op.backward
      and cases.backward(op, values, cases.upstream(op, values, dtype), (cases.differentiable(op)),
        dtype)
    local what = threads .. " threads"
    if first then
      same_outputs(op, values, first, what)
      same_gradients(gradients or {}, first_gradients or {}, what)
    else
      first, first_gradients = values, gradients
    end
  end)
end

-- Outputs that are not asked for change nothing in the others.
local function check_optional(op, case, shape, dtype)
  local inputs = cases.inputs(op, case, shape, dtype)
  local all, none = cases.forward(op, inputs, dtype), {}
  for _, t in ipairs(op.tensors) do
    if t.role == "output" and t.optional then
      none[t.name] = true
      same_outputs(op, all, cases.forward(op, inputs, dtype, { [t.name] = true }), "no " .. t.name)
    end
  end
  same_outputs(op, all, cases.forward(op, inputs, dtype, none), "nothing optional")
end

-- No op changes an input, and no backward what its forward saved, unless its shape line says so.
local function check_inputs_kept(op, case, shape, dtype)
  local inputs, before = cases.inputs(op, case, shape, dtype), {}
  local function keep(values)
    for name, x in pairs(values) do
      before[name] = Tensor.is(x) and helper.to(x, x.dtype) or nil
    end
  end
  local function check(values, of)
    for _, t in ipairs(of.tensors) do
      if t.role == "input" and values[t.name] then
        same(values[t.name], before[t.name], ("%s changed %s"):format(of.name, t.name))
      end
    end
  end
  keep(inputs)
  local values = cases.forward(op, inputs, dtype)
  check(inputs, op)
  if op.backward then
    keep(values)
    local up = cases.upstream(op, values, dtype)
    local _, args = cases.backward(op, values, up, (cases.differentiable(op)), dtype)
    for name, dy in pairs(up) do
      before["d" .. name] = cases.upstream(op, values, dtype)[name]
      assert(args["d" .. name] == dy)
    end
    check(args, op.backward)
  end
end

-- ---- layout ----

-- As helper.strided, and a check that nothing between the rows was touched.
local function spaced(shape, dtype)
  local y, room = helper.strided(Tensor.empty(shape, dtype):fill_(0), 5)
  return y, function(what)
    y:fill_(-7)
    for i, value in ipairs(helper.values(room)) do
      assert(value == -7, ("%s: wrote between its rows, at %d"):format(what, i))
    end
  end
end

local function is_spaceable(t, x)
  return t.strided and x and #x.shape >= 2 and x:numel() > 0
end

-- Inputs and outputs whose rows lie apart give the bits of dense ones.
local function check_strided(op, case, shape, dtype)
  local inputs = cases.inputs(op, case, shape, dtype)
  local dense = cases.forward(op, inputs, dtype)
  local apart, checks = {}, {}
  for name, x in pairs(dense) do
    local t = op.tensor[name]
    apart[name] = x
    if t and t.role == "input" and is_spaceable(t, x) then
      apart[name] = helper.strided(x, 5)
    elseif t and t.role ~= "input" then
      if is_spaceable(t, x) then
        apart[name], checks[name] = spaced(x.shape, x.dtype)
        apart[name]:copy_(inputs[name] or x)
      else
        apart[name] = helper.to(inputs[name] or x, x.dtype)
      end
      if t.accumulate then
        apart[name]:fill_(0)
      end
    end
  end
  cases.call(op, apart)
  same_outputs(op, apart, dense, "rows apart")
  for name, check in pairs(checks) do
    check(op.name .. ": " .. name)
  end
  if not op.backward then
    return
  end
  local names = cases.differentiable(op)
  local up = cases.upstream(op, dense, dtype)
  local wanted = cases.backward(op, dense, up, names, dtype)
  local up_apart, values = {}, {}
  for name, x in pairs(dense) do
    values[name] = op.tensor[name] and is_spaceable(op.tensor[name], x) and apart[name] or x
  end
  for name, dy in pairs(up) do
    up_apart[name] = is_spaceable(op.backward.tensor["d" .. name], dy) and helper.strided(dy, 3)
      or dy
  end
  for _, t in ipairs(op.tensors) do
    -- What the backward declares dense stays dense.
    local saved = op.backward.tensor[t.name]
    if saved and not saved.strided then
      values[t.name] = dense[t.name]
    elseif t.role ~= "input" and apart[t.name] and saved then
      values[t.name] = helper.strided(dense[t.name], 5)
    end
  end
  local after = {}
  local gradients = cases.backward(op, values, up_apart, names, dtype, {
    make = function(t, of, kind)
      if t.strided and #of >= 2 and dense[t.name:sub(2)]:numel() > 0 then
        local y, check = spaced(of, kind)
        after[t.name] = check
        return y
      end
      return Tensor.empty(of, kind)
    end,
  })
  same_gradients(gradients, wanted, "rows apart")
  for name, check in pairs(after) do
    check(op.backward.name .. ": " .. name)
  end
end

-- ---- refusals ----

-- Every parameter of the op by name, as one working call: for a backward the ones after its
-- forward.
local function working_call(op, case, shape, dtype)
  local forward = op.backward_of or op
  local inputs = cases.inputs(forward, case, shape, dtype)
  local values = cases.forward(forward, inputs, dtype)
  if op == forward then
    return values
  end
  local names = cases.differentiable(forward)
  local _, args = cases.backward(forward, values, cases.upstream(forward, values, dtype), names,
    dtype)
  return args
end

local function with(args, name, value)
  local changed = {}
  for key, x in pairs(args) do
    changed[key] = x
  end
  if name then
    changed[name] = value
  end
  return changed
end

-- What a change of one size must name: the tensor itself where an earlier one has set the size,
-- anything where it sets it for later ones, nothing where it stands alone.
local function size_conflict(op, args, t, index)
  local dim = t.dims[index]
  if dim.number or dim.attr then
    return t.name
  end
  local before = true
  for _, other in ipairs(op.tensors) do
    if other == t then
      before = false
    elseif args[other.name] then
      for _, d in ipairs(other.dims) do
        if (dim.any and d.any) or (dim.letter and dim.letter == d.letter) then
          return before and t.name or ""
        end
      end
    end
  end
  -- Twice in one shape.
  for i, d in ipairs(t.dims) do
    if i ~= index and dim.letter and d.letter == dim.letter then
      return t.name
    end
  end
end

local function longer(x, index)
  local shape = { unpack(x.shape) }
  shape[index] = shape[index] + 1
  return Tensor.empty(shape, x.dtype):fill_(0)
end

local function check_shapes(op, args)
  for _, t in ipairs(op.tensors) do
    local x = args[t.name]
    if x then
      local any = t.dims[1] and t.dims[1].any
      if not any and #x.shape < 4 then
        local shape = { 1, unpack(x.shape) }
        raises(function()
          cases.call(op, with(args, t.name, Tensor.empty(shape, x.dtype):fill_(0)))
        end, ("%s: %s is %s, wanted ["):format(op.name, t.name, Tensor.shape_text(shape)))
      end
      local lead = #x.shape - #t.dims
      for index, dim in ipairs(t.dims) do
        local at = dim.any and 1 or index + (any and lead or 0)
        local named = x.shape[at] and size_conflict(op, args, t, index)
        if named then
          local wrong = longer(x, at)
          raises(function()
            cases.call(op, with(args, t.name, wrong))
          end, op.name .. ": " .. named, ", wanted [",
            named ~= "" and Tensor.shape_text(wrong.shape) or "")
        end
      end
    end
  end
end

local function check_dtypes(op, args)
  for _, t in ipairs(op.tensors) do
    local x = args[t.name]
    if x and t.dtype ~= "any" then
      local wanted, others = x.dtype, { "u8" }
      if t.dtype == "shared" and op.takes_f16 then
        wanted, others = "f32, bf16, f16 or f64", { "i32" }
      elseif t.dtype == "shared" then
        wanted, others = "f32, bf16 or f64", { "i32", "f16" }
      end
      for _, other in ipairs(others) do
        raises(function()
          cases.call(op, with(args, t.name, Tensor.empty(x.shape, other):fill_(0)))
        end, ("%s: %s is %s, wanted %s"):format(op.name, t.name, other, wanted))
      end
    end
  end
end

local function check_missing(op, args)
  for _, t in ipairs(op.tensors) do
    if not t.optional then
      raises(function()
        cases.call(op, with(args, t.name, nil))
      end, ("%s: %s is "):format(op.name, t.name))
    end
    if t.role == "input" then
      raises(function()
        cases.call(op, with(args, t.name, 3))
      end, ("%s: %s is number 3, wanted a tensor"):format(op.name, t.name))
    end
  end
end

local function check_attributes(op, args)
  for _, p in ipairs(op.params) do
    if not p.tensor then
      local wanted = p.ctype:match("bool") and "true or false" or p.ctype:match("int")
        and "a whole number" or "a number"
      raises(function()
        cases.call(op, with(args, p.name, "x"))
      end, ("%s: %s is x, wanted %s"):format(op.name, p.name, wanted))
      raises(function()
        cases.call(op, with(args, p.name, nil))
      end, ("%s: %s is nil, wanted %s"):format(op.name, p.name, wanted))
      if wanted == "a whole number" then
        raises(function()
          cases.call(op, with(args, p.name, 1.5))
        end, ("%s: %s is 1.5, wanted a whole number"):format(op.name, p.name))
      end
    end
  end
end

-- Gaps where the shape line allows none, and a last dimension that is not dense.
local function check_layouts(op, args)
  for _, t in ipairs(op.tensors) do
    local x = args[t.name]
    if x and #x.shape >= 1 and x.shape[#x.shape] > 1 and x:numel() > 0 then
      local strides, step = {}, 2
      for i = #x.shape, 1, -1 do
        strides[i] = step
        step = step * x.shape[i]
      end
      local thin = Tensor.view_of(Tensor.empty({ step }, x.dtype):fill_(0), 0, x.shape, strides)
      raises(function()
        cases.call(op, with(args, t.name, thin))
      end, ("%s: %s has stride 2 in dimension %d, wanted 1: make it contiguous"):format(op.name,
        t.name, #x.shape))
    end
    if x and not t.strided and #x.shape >= 2 and x.shape[#x.shape - 1] > 1 and x:numel() > 0 then
      raises(function()
        cases.call(op, with(args, t.name, (helper.strided(x, 5))))
      end, ("%s: %s has stride "):format(op.name, t.name), ": make it contiguous")
    end
  end
end

-- A shape of the case to break: with elements in every tensor, and more than one of them.
local function shape_to_break(op, case)
  for _, shape in ipairs(case.shapes) do
    local inputs, usable = cases.inputs(op, case, shape, "f32"), true
    for name, x in pairs(inputs) do
      usable = usable and (not op.tensor[name] or x:numel() > 1)
    end
    if usable then
      return shape
    end
  end
  return case.shapes[1]
end

-- The inputs with one letter's size, or the leading one, set to 0.
local function shrunk(op, inputs, letter)
  local values = with(inputs)
  for _, t in ipairs(op.tensors) do
    local x = inputs[t.name]
    local shape, hit = x and { unpack(x.shape) }, false
    for i, d in ipairs(x and t.dims or {}) do
      local at = d.any and 1 or i + (t.dims[1].any and #x.shape - #t.dims or 0)
      if shape[at] and (d.letter or "*") == letter then
        shape[at], hit = d.plus or 0, true
      end
    end
    if hit then
      values[t.name] = Tensor.empty(shape, x.dtype):fill_(0)
    end
  end
  return values
end

-- Any size may be 0: the op works, or refuses by its own name.
local function check_zero_sizes(op, case)
  local inputs, letters = cases.inputs(op, case, shape_to_break(op, case), "f32"), {}
  for _, t in ipairs(op.tensors) do
    for _, d in ipairs(t.dims) do
      letters[d.letter or "*"] = true
    end
  end
  for letter in pairs(letters) do
    local ok, values = pcall(cases.forward, op, shrunk(op, inputs, letter), "f32")
    local message = values
    if ok and op.backward then
      ok, message = pcall(cases.backward, op, values, cases.upstream(op, values, "f32"),
        (cases.differentiable(op)), "f32")
    end
    assert(ok or message:find(op.name .. "[_%a]*: "), tostring(message))
  end
end

local function is_empty(op, case, shape)
  for name, x in pairs(cases.inputs(op, case, shape, "f32")) do
    if op.tensor[name] and x:numel() == 0 then
      return true
    end
  end
  return false
end

-- ---- the specs ----

for _, op in ipairs(cases.ops()) do
  local case = cases.of(op.name)

  describe(op.name, function()
    it("has a case", function()
      assert(case, ("spec/cases/%s.lua is missing"):format(op.name))
      assert.is_true(#case.shapes > 0 and #case.bench > 0)
      assert.is_number(case.bytes(case.bench[1], 4))
    end)

    if not case then
      return
    end

    local short = { "bf16", op.takes_f16 and "f16" or nil }
    for _, shape in ipairs(case.shapes) do
      local text = cases.text(shape)
      if op.backward and shape.grad ~= false then
        it("has the gradient of its own output, " .. text, function()
          for _, inputs in ipairs(variants(op, cases.inputs(op, case, shape, "f64"))) do
            check_gradients(op, inputs)
          end
        end)
      end
      it("agrees with f64 in " .. table.concat({ "f32", unpack(short) }, ", ") .. ", " .. text,
        function()
          agree(op, case, shape, "f32")
          for _, dtype in ipairs(short) do
            agree(op, case, shape, dtype)
          end
        end)
      it("gives the same bits again and on any number of threads, " .. text, function()
        for _, dtype in ipairs({ "f32", "f64", unpack(short) }) do
          same_bits(op, case, shape, dtype)
        end
      end)
      it("changes no input and needs no optional output, " .. text, function()
        check_inputs_kept(op, case, shape, "f32")
        for _, dtype in ipairs(short) do
          check_inputs_kept(op, case, shape, dtype)
        end
        check_optional(op, case, shape, "f32")
        check_optional(op, case, shape, "f64")
      end)
      it("reads and writes rows that lie apart, " .. text, function()
        check_strided(op, case, shape, "f32")
        for _, dtype in ipairs(short) do
          check_strided(op, case, shape, dtype)
        end
      end)
    end

    it("has a case without elements", function()
      local found
      for _, shape in ipairs(case.shapes) do
        found = found or is_empty(op, case, shape)
      end
      assert(found, "no shape of the case is empty")
    end)

    it("takes any size of 0 or refuses it by name", function()
      check_zero_sizes(op, case)
    end)

    for _, which in ipairs({ op, op.backward }) do
      local function args()
        return working_call(which, case, shape_to_break(op, case), "f32")
      end
      local of = which.backward_of and " in its backward" or ""
      it("names the tensor whose shape it refuses" .. of,
        function() check_shapes(which, args()) end)
      it("names the tensor whose dtype it refuses" .. of,
        function() check_dtypes(which, args()) end)
      it("names what is missing or is no tensor" .. of, function() check_missing(which, args()) end)
      it("names the attribute it refuses" .. of, function() check_attributes(which, args()) end)
      it("refuses strides that it cannot take (B14)" .. of,
        function() check_layouts(which, args()) end)
    end
  end)
end
