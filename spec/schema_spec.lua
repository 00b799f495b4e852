local helper = require("spec.helper")
local schema = require("liger.schema")

local function parse(text)
  return schema.parse(text)
end

local LINEAR = [[
/* y = x w^T + b.
 *: ~x[*,C] w[O,C] b?[O] -> y[*,O] rest[N+1,2]:i32 */
lg_status lg_linear(lg_context *ctx, const lg_tensor *x, const lg_tensor *w, const lg_tensor *b,
  double scale,
                    lg_tensor *y, lg_tensor *rest);
/*: dy[*,O] x[*,C] w[O,C] -> dx[*,C] dw+[O,C]:acc */
lg_status lg_linear_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
  const lg_tensor *w,
                             lg_tensor *dx, lg_tensor *dw);
]]

describe("schema", function()
  it("reads names, roles and marks", function()
    local ops = parse(LINEAR)
    local op = ops.linear
    assert.equal(2, #ops)
    assert.equal("y = x w^T + b.", op.doc)
    assert.equal("~x[*,C] w[O,C] b?[O] -> y[*,O] rest[N+1,2]:i32", op.line)
    local names = {}
    for i, p in ipairs(op.params) do
      names[i] = p.ctype .. p.name
    end
    assert.same({
      "const lg_tensor *x", "const lg_tensor *w", "const lg_tensor *b", "double scale",
        "lg_tensor *y",
      "lg_tensor *rest",
    }, names)
    assert.is_true(op.tensor.x.strided)
    assert.is_false(op.tensor.w.strided)
    assert.is_true(op.tensor.b.optional)
    assert.equal("output", op.tensor.y.role)
    assert.equal("i32", op.tensor.rest.dtype)
    assert.equal("shared", op.tensor.x.dtype)
    assert.same({ { letter = "N", plus = 1 }, { number = 2 } }, op.tensor.rest.dims)
    assert.same({ { any = true }, { letter = "C", plus = 0 } }, op.tensor.x.dims)
  end)

  it("joins an op with its backward, whose outputs are all optional", function()
    local ops = parse(LINEAR)
    assert.equal(ops.linear_backward, ops.linear.backward)
    assert.equal(ops.linear, ops.linear_backward.backward_of)
    assert.is_true(ops.linear_backward.tensor.dx.optional)
    assert.is_true(ops.linear_backward.tensor.dw.accumulate)
    assert.equal("acc", ops.linear_backward.tensor.dw.dtype)
  end)

  it("knows which outputs a caller must bring", function()
    assert.is_true(parse(LINEAR).linear.explicit) -- N is bound by nothing
    local declared = "\nlg_status lg_op(lg_context *ctx, const lg_tensor *x, lg_tensor *y);"
    local ops = parse("/*: x[*] -> y[*] */" .. declared)
    assert.is_false(ops.op.explicit)
    ops = parse("/*: -> y[*] */\nlg_status lg_fill(lg_context *ctx, double value, lg_tensor *y);")
    assert.is_true(ops.fill.explicit)
    ops = parse("/*: x[*]:any -> y[*]:any */" .. declared)
    assert.is_true(ops.op.explicit)
  end)

  it("reads updates in place and attribute sizes", function()
    local ops = parse([[
/*: x[n,N] y[N] -> y */
lg_status lg_add_to(lg_context *ctx, const lg_tensor *x, int64_t n, lg_tensor *y);]])
    assert.equal("inplace", ops.add_to.tensor.y.role)
    assert.same({ { attr = "n" }, { letter = "N", plus = 0 } }, ops.add_to.tensor.x.dims)
  end)

  it("reads defaults of attributes, false among them, and refuses others", function()
    local function op(line)
      return parse(("/*: %s */"):format(line) .. "\nlg_status lg_op(lg_context *ctx, "
        .. "const lg_tensor *x, double low, bool cut, int64_t n, lg_tensor *y);").op
    end
    local params = op("x[*] low=-0.5 cut=false -> y[*]").params
    assert.same({ -0.5, false }, { params[2].default, params[3].default })
    assert.is_nil(params[4].default)
    assert.is_false(op("x[*] low=-0.5 -> y[*]").explicit)
    helper.raises(function() op("x[*] low=much -> y[*]") end, "op: cannot read default low=much")
    helper.raises(function() op("x[*] high=1 -> y[*]") end, "op: no attribute is named high")
  end)

  it("takes only the comment that touches an op", function()
    local ops = parse([[
/* ---- a heading ---- */

/* Doc.
 *: x[*] -> y[*] */
lg_status lg_exp(lg_context *ctx, const lg_tensor *x, lg_tensor *y);]])
    assert.equal("Doc.", ops.exp.doc)
  end)

  local refusals = {
    { "no arrow", "/*: x[*] y[*] */", "const lg_tensor *x, lg_tensor *y",
      "op: no -> in its shape line" },
    { "no shape line", "/* words */", "const lg_tensor *x", "op: no shape line" },
    { "a dimension that is none", "/*: x[*,%] -> y[*] */", "const lg_tensor *x, lg_tensor *y",
      "op: cannot read dimension %" },
    { "loose words", "/*: x[*] z -> y[*] */", "const lg_tensor *x, lg_tensor *y",
      "op: cannot read z" },
    { "an update of nothing", "/*: x[*] -> y[*] z */", "const lg_tensor *x, lg_tensor *y",
      "op: z has no shape" },
    { "a tensor without a shape", "/*: x[*] -> y[*] */",
      "const lg_tensor *x, const lg_tensor *w, lg_tensor *y",
      "op: w is not in its shape line" },
    { "a shape without a tensor", "/*: x[*] w[*] -> y[*] */", "const lg_tensor *x, lg_tensor *y",
      "op: its shape line names no parameter: w" },
    { "an input that is not const", "/*: x[*] -> y[*] */", "lg_tensor *x, lg_tensor *y",
      "op: const of x disagrees with its shape line" },
    { "an output that is const", "/*: x[*] -> y[*] */", "const lg_tensor *x, const lg_tensor *y",
      "op: const of y disagrees with its shape line" },
    { "a name that reads as a gradient", "/*: x[*] dx[*] -> y[*] */",
      "const lg_tensor *x, const lg_tensor *dx, lg_tensor *y",
        "op: dx reads as the gradient of x" },
  }
  for _, row in ipairs(refusals) do
    it("refuses " .. row[1], function()
      helper.raises(function()
        parse(("%s\nlg_status lg_op(lg_context *ctx, %s);"):format(row[2], row[3]))
      end, row[4])
    end)
  end

  it("refuses a backward before its forward", function()
    helper.raises(function()
      parse([[
/*: dy[*] -> dx[*] */
lg_status lg_op_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *dx);]])
    end, "op_backward: its forward is not declared before it")
  end)

  it("makes a header readable for the FFI", function()
    local text = schema.cdef([[
#ifndef A_H
#define A_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
int f(int);
#ifdef __cplusplus
}
#endif
#endif
]])
    assert.equal("int f(int);", (text:gsub("^%s+", ""):gsub("%s+$", "")))
  end)

  it("reads every declaration of ops.h", function()
    local text = helper.read("src/ops.h")
    local count = 0
    for _ in text:gmatch("\nlg_status lg_") do
      count = count + 1
    end
    assert.equal(count, #parse(text))
  end)

  it("gives editor stubs that promise what the wrappers return", function()
    local ops = require("liger.ops")
    local folder = os.tmpname()
    os.remove(folder)
    local line = "mkdir -p %s/op && luajit src/opgen.lua src/liger.h src/comm.h src/ops.h %s"
    assert.equal(0, os.execute(line:format(folder, folder)))
    local stubs = helper.read(folder .. "/ops.meta.lua")
    os.execute("rm -r " .. folder)
    local function promised(name)
      local names, at = {}, stubs:find("\nfunction ops." .. name .. "(", 1, true)
      local stub = stubs:sub(1, at):match(".*\n\n(.-)$")
      for result in stub:gmatch("@return liger%.Tensor ([%w_]+)") do
        names[#names + 1] = result
      end
      return names
    end
    assert.same({ "logp", "lse" }, promised("linear_logprob"))
    assert.same({ "y" }, promised("linear"))
    assert.same({}, promised("fill"))
    local x, target = require("liger.fn").ones(2, 3), helper.ids(0, 1)
    assert.equal(2, select("#", ops.linear_logprob(x, x, nil, target, 1, 0, -100)))
  end)

  it("finds a gradient's partner for every d name of ops.h", function()
    for _, op in ipairs(parse(helper.read("src/ops.h"))) do
      for _, t in ipairs(op.tensors) do
        local base = op.backward_of and t.name:sub(1, 1) == "d"
          and op.backward_of.tensor[t.name:sub(2)]
        if op.backward_of and t.role == "output" then
          assert(base, op.name .. " gives " .. t.name .. ", which is no forward tensor's gradient")
        end
        if base and t.role == "output" then
          assert(base.role == "input", op.name .. ": " .. t.name .. " is the gradient of an output")
        end
      end
    end
  end)
end)
