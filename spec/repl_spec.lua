-- The prompt, by piped input and by its functions.
require("spec.helper")
local autograd = require("liger.autograd")
local fn = require("liger.fn")
local memory = require("liger.memory")
local repl = require("liger.cli.repl")

-- What the prompt prints for lines of input.
local function typed(env, ...)
  local input, out = io.tmpfile(), {}
  input:write(table.concat({ ... }, "\n"), "\n")
  input:seek("set")
  repl.run(env, {
    input = input,
    interactive = false,
    write = function(...)
      for i = 1, select("#", ...) do
        out[#out + 1] = tostring((select(i, ...)))
      end
    end,
  })
  input:close()
  return table.concat(out)
end

local function environment()
  return setmetatable({ autograd = autograd, fn = fn, memory = memory }, { __index = _G })
end

describe("the prompt", function()
  it("prints the values of an expression and of a return", function()
    assert.equal("5\n", typed(environment(), "return 5"))
    assert.equal("1\nnil\n", typed(environment(), "1, nil"))
    assert.equal("3\n", typed(environment(), "local x = 3", "local x = 3 return x"))
    assert.equal("", typed(environment(), "x = 1", "return"))
  end)

  it("shows as many digits as an f32 has, and all of other numbers", function()
    assert.equal("0.100000001\n", typed(environment(), "fn.full(0.1, 1):item()"))
    assert.equal("0.33333333333333\n", typed(environment(), "1 / 3"))
    assert.equal("1073741824\n", typed(environment(), "2 ^ 30"))
    assert.equal("nan\n", (typed(environment(), "math.abs(0 / 0)")))
    assert.equal("{ 0.100000001 }\n", typed(environment(), "{ fn.full(0.1, 1):item() }"))
  end)

  it("shows an object of a class on one line", function()
    local Class = {}
    Class.__index = Class
    local object = setmetatable({ shape = {}, config = {}, 1, 2 }, Class)
    assert.equal("object with config, shape", repl.show(object))
    for i = 1, 40 do
      object["field" .. i] = i
    end
    assert.equal(90, #repl.show(object))
  end)

  it("records again and closes scopes after an error", function()
    local lost = "lost = 1; error('no') end)"
    local output = typed(environment(), "autograd.no_grad(function() " .. lost,
      "autograd.state.recording", "memory.scope(function() lost = fn.ones(2) " .. lost,
      "memory.in_scope()")
    assert.equal("error: repl:1: no\ntrue\nerror: repl:1: no\nfalse\n", output)
  end)

  it("completes a tensor's methods and fields", function()
    local env = environment()
    env.x = fn.ones(2)
    assert.same({ "x:reshape" }, repl.complete(env, "x:resh"))
    assert.same({ "x.shape" }, repl.complete(env, "x.sha"))
    assert.same({}, repl.complete(env, "x:sha"))
  end)

  it("says what Ctrl-C does and does not", function()
    local help = typed(environment(), "help")
    assert.is_truthy(help:find("a compiled loop does not stop, there a second Ctrl%-C\nends"))
  end)
end)
