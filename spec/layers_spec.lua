-- The dependency rules of the source tree, read from its own text: what requires and includes what.
local helper = require("spec.helper")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

-- A module may require its own level and those below.
local LEVEL = {
  device = 0, ffi = 0, file = 0, schema = 0, sys = 0,
  memory = 1, options = 1, tensor = 1,
  autograd = 2, gradient = 2, graph = 2, ops = 2, ranks = 2,
  arithmetic = 3, create = 3, fn = 3, head = 3, logits = 3,
  model = 4, nn = 4, optim = 4,
  loss = 5, data = 5, rollout = 5, train = 5, cli = 5, liger = 5,
}

-- Upward, with a reason.
local ALLOWED = {
  ["model/init"] = { ["data.tokenizer"] = "a model's folder holds its tokenizer too" },
}

-- Every Lua file below a folder: paths relative to it, without ".lua".
local function lua_files(folder, prefix, list)
  list, prefix = list or {}, prefix or ""
  for _, name in ipairs(helper.list(folder)) do
    if name:find("%.lua$") then
      list[#list + 1] = prefix .. name:gsub("%.lua$", "")
    elseif not name:find("%.") then
      lua_files(folder .. "/" .. name, prefix .. name .. "/", list)
    end
  end
  return list
end

local function files(folder, pattern)
  local list = {}
  for _, name in ipairs(helper.list(folder)) do
    if name:find(pattern) then
      list[#list + 1] = name
    end
  end
  return list
end

-- The modules under liger. that a Lua text requires.
local function requires(text)
  local list = {}
  for name in text:gmatch("require%s*%(?%s*[\"']liger%.?([%w_.]*)[\"']") do
    list[#list + 1] = name
  end
  return list
end

local function includes(text)
  local list = {}
  for name in ("\n" .. text):gmatch('\n#include "([^"]+)"') do
    list[#list + 1] = name
  end
  return list
end

local function folder_of(module)
  return module:match("^[^./]+")
end

local modules = lua_files("lua/liger")

describe("Lua modules", function()
  it("are all on a level", function()
    assert.is_true(#modules > 8)
    for _, module in ipairs(modules) do
      assert(module == "init" or LEVEL[folder_of(module)],
        module .. " is on no level: say so in this spec")
    end
  end)

  it("require only their own level and those below", function()
    for _, module in ipairs(modules) do
      local level = LEVEL[folder_of(module)]
      for _, name in ipairs(requires(helper.read("lua/liger/" .. module .. ".lua"))) do
        local of = LEVEL[folder_of(name ~= "" and name or "liger")]
        local allowed = ALLOWED[module] and ALLOWED[module][name]
        if level and not allowed then
          assert(of, ("%s requires liger.%s, which is on no level"):format(module, name))
          assert(of <= level, ("%s requires liger.%s, which is above it"):format(module, name))
        end
      end
    end
  end)

  it("that are siblings in loss, nn and model do not require each other", function()
    for _, module in ipairs(modules) do
      local folder, file = module:match("^(%a+)/(.*)$")
      if (folder == "loss" or folder == "nn" or folder == "model") and file ~= "init" then
        for _, name in ipairs(requires(helper.read("lua/liger/" .. module .. ".lua"))) do
          -- A module may be cut: grpo_metrics is a part of grpo.
          local is_part = name:gsub("%.", "/"):find(module .. "_", 1, true) == 1
          assert(is_part or folder_of(name) ~= folder,
            ("%s requires its sibling liger.%s"):format(module, name))
        end
      end
    end
  end)

  it("declare and load C only in ffi.lua", function()
    for _, root in ipairs({ "lua", "recipes", "bench" }) do
      for _, module in ipairs(lua_files(root)) do
        local text = helper.read(root .. "/" .. module .. ".lua"):gsub("%-%-[^\n]*", "")
        local said = text:match("ffi%.cdef") or text:match("ffi%.load")
        assert(module == "liger/ffi" or not said,
          ("%s/%s says %s"):format(root, module, tostring(said)))
      end
    end
  end)

  it("below cli and train let errors pass, print nothing and touch no globals", function()
    for _, module in ipairs(modules) do
      local folder = folder_of(module)
      if folder ~= "cli" and folder ~= "train" and folder ~= "init" then
        local text = helper.read("lua/liger/" .. module .. ".lua"):gsub("%-%-[^\n]*", "")
        -- cjson says what is wrong with a file only by raising.
        text = text:gsub("pcall%(cjson%.decode", "")
        for _, word in ipairs({ "pcall", "print", "setfenv", "rawset" }) do
          assert(not text:find("%f[%w_.]" .. word .. "%s*%("), ("%s calls %s"):format(module, word))
        end
        assert(not text:find("%f[%w_]_G%f[^%w_]"), module .. " touches the globals")
      end
    end
  end)
end)

describe("recipes", function()
  local recipes = lua_files("recipes")

  it("are under 150 lines", function()
    for _, name in ipairs(recipes) do
      local _, lines = helper.read("recipes/" .. name .. ".lua"):gsub("\n", "")
      assert(lines < 150, ("%s has %d lines"):format(name, lines))
    end
  end)

  it("are imported by nothing", function()
    for _, module in ipairs(modules) do
      local text = helper.read("lua/liger/" .. module .. ".lua")
      assert(not text:find("require%s*%(?%s*[\"']recipes"), module .. " requires a recipe")
    end
  end)
end)

describe("C files", function()
  it("in cpu include the library's inside, no public surface above it and no CUDA", function()
    local own = {}
    for _, name in ipairs(files("src/cpu", "%.h$")) do
      own[name] = true
    end
    for _, name in ipairs(files("src/cpu", "%.[ch]$")) do
      local text = helper.read("src/cpu/" .. name)
      for _, header in ipairs(includes(text)) do
        local fine = own[header] or header == "../internal.h" or header == "backend.h"
          or header == "../philox.h"
        assert(fine, ("src/cpu/%s includes %s"):format(name, header))
      end
      assert(not text:find("#include <cu"), name .. " includes CUDA")
    end
  end)

  it("never include each other", function()
    for _, folder in ipairs({ "src", "src/cpu", "kernels" }) do
      for _, name in ipairs(files(folder, "%.[chu]+$")) do
        for _, header in ipairs(includes(helper.read(folder .. "/" .. name))) do
          assert(not header:find("%.cu?$"), ("%s/%s includes %s"):format(folder, name, header))
        end
      end
    end
  end)

  it("in kernels include their common header", function()
    for _, name in ipairs(files("kernels", "%.cu$")) do
      for _, header in ipairs(includes(helper.read("kernels/" .. name))) do
        assert(header:find("%.cuh$") or header:find("%.h$"),
          ("kernels/%s includes %s"):format(name, header))
      end
    end
  end)

  it("below the library's inside see only the public headers", function()
    assert.same({ "liger.h" }, includes(helper.read("src/internal.h")))
    assert.same({ "liger.h" }, includes(helper.read("src/ops.h")))
    assert.same({}, includes(helper.read("src/liger.h")))
  end)

  it("never leave the process, print or assert in the library", function()
    for _, folder in ipairs({ "src", "src/cpu" }) do
      for _, name in ipairs(files(folder, "%.c$")) do
        if name ~= "main.c" then
          local text = helper.read(folder .. "/" .. name):gsub("/%*.-%*/", ""):gsub('"[^"\n]*"', "")
          -- The second Ctrl-C ends the process from the signal's handler.
          text = name == "sys.c" and text:gsub("_exit", "") or text
          -- A Python environment's folder is known by its variable; CUDA's libraries may lie there.
          text = name == "context.c" and text:gsub("getenv", "") or text
          for _, word in ipairs({ "exit", "_exit", "abort", "assert", "printf", "puts",
            "getenv" }) do
            assert(not text:find("%f[%w_]" .. word .. "%s*%("),
              ("%s/%s calls %s"):format(folder, name, word))
          end
        end
      end
    end
  end)
end)

describe("every operator", function()
  local defined = {}
  for _, name in ipairs(files("src/cpu", "%.c$")) do
    for op in helper.read("src/cpu/" .. name):gmatch("cpu_([%w_]+)%s*%(") do
      defined[op] = name
    end
  end
  -- A family's functions may be made by a macro that is given the name.
  local function is_defined(op)
    if defined[op] then
      return true
    end
    for _, name in ipairs(files("src/cpu", "%.c$")) do
      local text = helper.read("src/cpu/" .. name)
      if text:find("cpu_##")
        and text:find("%f[%w_]" .. op:gsub("_backward$", "") .. "%f[^%w_]") then
        return true
      end
    end
  end

  it("has a C file", function()
    for _, op in ipairs(ops.schema) do
      assert(is_defined(op.name), "no file in src/cpu has cpu_" .. op.name)
    end
  end)

  it("has a case", function()
    for _, op in ipairs(ops.schema) do
      assert(op.backward_of or helper.exists("spec/cases/" .. op.name .. ".lua"),
        "no case of " .. op.name)
    end
  end)

  it("has a Lua function, and every case an operator", function()
    for _, op in ipairs(ops.schema) do
      assert.is_function(ops.raw[op.name])
      assert(op.backward_of or ops[op.name], op.name)
    end
    for _, name in ipairs(files("spec/cases", "%.lua$")) do
      assert(ops.schema[name:gsub("%.lua$", "")], "spec/cases/" .. name .. " is of no operator")
    end
  end)

  it("has a doc line and a shape line", function()
    for _, op in ipairs(ops.schema) do
      assert(op.line ~= "" and (op.backward_of or op.doc ~= ""), op.name .. " has no doc")
    end
  end)
end)

describe("the README", function()
  it("names files that are there", function()
    local text, named = helper.read("README.md"), 0
    for path in text:gmatch("`([%w_.]+/[%w_./]+%.%a+)`") do
      -- op stands for any operator's name in what adding one takes.
      if not path:find("/op%.") then
        named = named + 1
        assert(helper.exists(path), "README.md names " .. path .. ", which is not there")
      end
    end
    assert.is_true(named > 0)
  end)
end)

describe("liger", function()
  it("gives its modules and functions by name", function()
    local liger = require("liger")
    assert.is_true(Tensor.is(liger.tensor({ 1, 2 })))
    assert.equal(require("liger.fn"), liger.fn)
    assert.equal(require("liger.ops"), liger.ops)
    assert.is_nil(liger.no_such_thing)
  end)

  it("refuses a library that was built from other headers", function()
    local printed = helper.run_lua([[
      local abi = require("abi")
      package.loaded.abi = { cdef = abi.cdef, ops = abi.ops, hash = abi.hash + 1 }
      print(pcall(require, "liger.ffi"))
    ]])
    assert.truthy(printed:find("libliger.so was built from other headers than abi.lua: rebuild it"))
  end)

  it("blames the user's line, also from a folder named liger", function()
    local printed = helper.run_lua([[
      local chunk = loadstring("local fn = require('liger.fn')\n return fn.zeros(2) + fn.zeros(3)",
        "@/home/me/liger/recipes/mine.lua")
      print(pcall(chunk))
    ]])
    assert.truthy(printed:find("/home/me/liger/recipes/mine.lua:2: add: b is [3], wanted [2]", 1,
      true), printed)
  end)
end)
