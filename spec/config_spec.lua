local helper = require("spec.helper")
local config = require("liger.train.config")
local options = require("liger.train.options")

local path

-- Runs a recipe's text with a command line; what the recipe returns.
local function run(text, ...)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  config.set_command({ recipe = path, args = { ... }, text = "" })
  return assert(loadfile(path))()
end

local recipe = [[
local liger = require("liger")
local config = liger.config({
  lr = 1e-3, -- learning rate
  num_epochs = 1, -- passes
  data = "", -- JSONL
  shuffle = true, -- in another order
  fast = false,
  clip = false, -- number or none
  file = false, -- path or none
  mix = false, -- anything or none
  length = false, -- tokens; default 5 for words, 256 for text
  loss_type = "grpo", -- which loss
  kind = false, -- default wide for words
}, {
  lr = { above = 0 }, length = { min = 1, whole = true }, kind = { "wide", "deep" },
  data = { also = "data_file" },
  num_epochs = { min = 1, max = 9, whole = true },
  loss_type = { "grpo", "dapo" },
})
return config
]]

-- The usage error of a command line.
local function refused(...)
  local ok, problem = pcall(run, recipe, ...)
  assert.is_false(ok)
  assert.are.equal(2, problem.code)
  return problem.message
end

describe("config", function()
  before_each(function()
    path = os.tmpname()
  end)
  after_each(function()
    config.set_command(nil)
    os.remove(path)
  end)

  it("gives the defaults and what every recipe has", function()
    local c = run(recipe)
    assert.are.equal(1e-3, c.lr)
    assert.are.equal("", c.data)
    assert.is_true(c.shuffle)
    assert.is_false(c.clip)
    assert.are.equal(0, c.seed)
    assert.are.equal(0, c.threads)
    assert.are.equal("f32", c.dtype)
    assert.are.equal("auto", c.device)
    assert.is_false(c.quiet)
    assert.are.same({ 500, 0, false }, { c.save_steps, c.save_total_limit, c.resume })
    assert.is_truthy(c.out:match("^runs/lua_%w+%-%d%d%d%d%d%d%d%d%-%d%d%d%d%d%d$"))
  end)

  it("reads --key value and --key=value by the type of the default", function()
    local c = run(recipe, "--lr", "0.5", "--num_epochs=3", "--data", "a b", "--loss_type", "dapo")
    assert.are.equal(0.5, c.lr)
    assert.are.equal(3, c.num_epochs)
    assert.are.equal("a b", c.data)
    assert.are.equal("dapo", c.loss_type)
    assert.are.equal("--x", run(recipe, "--data=--x").data)
    assert.are.equal("", run(recipe, "--data=").data)
  end)

  it("reads --flag, --no-flag and --flag true", function()
    assert.is_true(run(recipe, "--fast").fast)
    assert.is_false(run(recipe, "--no-shuffle").shuffle)
    assert.is_false(run(recipe, "--no_shuffle").shuffle)
    assert.is_false(run(recipe, "--shuffle=false").shuffle)
    assert.is_true(run(recipe, "--fast", "true").fast)
    local c = run(recipe, "--fast", "--lr", "2")
    assert.is_true(c.fast)
    assert.are.equal(2, c.lr)
  end)

  it("reads what a default of false may be instead from its comment", function()
    assert.are.equal(1.5, run(recipe, "--clip", "1.5").clip)
    assert.is_false(run(recipe, "--clip", "none").clip)
    assert.is_false(run(recipe, "--no-clip").clip)
    assert.are.equal("3", run(recipe, "--file", "3").file)
    assert.are.equal(3, run(recipe, "--length", "3").length)
    assert.is_false(run(recipe).length)
    assert.are.equal(
      '--length: got "0", wanted a whole number from 1 or none', refused("--length", "0")
    )
    assert.is_false(run(recipe).kind)
    assert.are.equal("deep", run(recipe, "--kind", "deep").kind)
    assert.are.equal('--kind: got "5", wanted one of wide, deep', refused("--kind", "5"))
    assert.are.equal(3, run(recipe, "--mix", "3").mix)
    assert.are.equal("x", run(recipe, "--mix", "x").mix)
    assert.are.equal('--clip: got "x", wanted a number or none', refused("--clip", "x"))
  end)

  it("reads another name of a key", function()
    assert.are.equal("x", run(recipe, "--data-file", "x").data)
    assert.are.equal("--data: given twice", refused("--data", "x", "--data_file", "y"))
  end)

  it("fills what nothing was said of", function()
    local c = run(recipe, "--length", "3")
    config.fill(c, { length = 5, kind = "wide", lr = 7 })
    assert.are.same({ 3, "wide", 1e-3 }, { c.length, c.kind, c.lr })
  end)

  it("B104: refuses keys that are wrong or misspelt, and values out of range", function()
    assert.are.equal("--optim.lr: unknown option, did you mean --lr?", refused("--optim.lr", "1"))
    assert.are.equal(
      "--learning_rate: unknown option, did you mean --lr?",
      refused("--learning_rate", "1")
    )
    assert.are.equal(
      "--num-epoch: unknown option, did you mean --num_epochs?",
      refused("--num-epoch", "1")
    )
    assert.are.equal('--lr: got "-1", wanted a number above 0', refused("--lr", "-1"))
    assert.are.equal(1e-4, run(recipe, "--lr", "1e-4").lr)
    assert.are.equal(2, run(recipe, "--num-epochs", "2").num_epochs)
  end)

  it("says what a value should have been", function()
    assert.are.equal('--lr: got "fast", wanted a number above 0', refused("--lr", "fast"))
    for _, text in ipairs({ "nan", "inf", "0x10", "1e", "", "1 2" }) do
      assert.is_truthy(refused("--lr", text):find("wanted a number above 0", 1, true))
    end
    assert.are.equal(
      '--num_epochs: got "1.5", wanted a whole number from 1 to 9',
      refused("--num_epochs", "1.5")
    )
    assert.is_truthy(refused("--num_epochs", "0"):find('got "0"', 1, true))
    assert.is_truthy(refused("--num_epochs", "10"):find('got "10"', 1, true))
    assert.are.equal(
      '--loss_type: got "dpo", wanted one of grpo, dapo',
      refused("--loss_type", "dpo")
    )
    assert.are.equal('--fast: got "yes", wanted true or false', refused("--fast=yes"))
  end)

  it("refuses a key without a value, a key given twice, and stray words", function()
    assert.are.equal("--lr: no value, wanted a number above 0", refused("--lr"))
    assert.are.equal("--lr: no value, wanted a number above 0", refused("--lr", "--fast"))
    assert.are.equal("--data: no value, wanted a text", refused("--data"))
    assert.are.equal("--lr: given twice", refused("--lr", "1", "--lr=2"))
    assert.are.equal("--shuffle: given twice", refused("--shuffle", "--no-shuffle"))
    assert.are.equal('--no-shuffle: got "1", wanted no value', refused("--no-shuffle=1"))
    assert.are.equal("--no-lr: unknown option, did you mean --lr?", refused("--no-lr"))
    assert.are.equal("x: unexpected word; options are --key value", refused("x"))
    assert.are.equal("-x: unknown option; options are --key value", refused("-x"))
  end)

  it("checks the options of every recipe", function()
    assert.are.equal('--dtype: got "f64", wanted one of f32, bf16', refused("--dtype", "f64"))
    assert.are.equal('--device: got "tpu", wanted auto, cpu or cuda:N', refused("--device", "tpu"))
    local device = run("return require(\"liger\").config {}", "--device", "cuda:1").device
    assert.are.equal("cuda:1", device)
    assert.is_truthy(refused("--seed", "-1"):find("--seed: got", 1, true))
    assert.is_truthy(refused("--threads", "1.5"):find("--threads: got", 1, true))
  end)

  it("lets a recipe choose the default of a common option", function()
    local text = 'return require("liger").config { seed = 7, out = "there" }'
    local c = run(text)
    assert.are.equal(7, c.seed)
    assert.are.equal("there", c.out)
    assert.are.equal(8, run(text, "--seed", "8").seed)
    assert.is_false((pcall(run, text, "--seed", "-1")))
  end)

  it("seeds the random numbers", function()
    local text = 'local l = require("liger"); l.config {}; return l.randn(3):to_table()'
    local first = run(text)
    assert.are.same(first, run(text))
    assert.are_not.same(first, run(text, "--seed", "1"))
  end)

  it("ends the recipe with status 0 on --help", function()
    local write, shown = io.write, {}
    io.write = function(...) -- luacheck: ignore 122
      for _, text in ipairs({ ... }) do
        shown[#shown + 1] = text
      end
    end
    local ok, problem = pcall(run, "-- What it does.\n-- More.\n\n" .. recipe, "--help")
    io.write = write -- luacheck: ignore 122
    assert.is_false(ok)
    assert.are.same({ code = 0 }, problem)
    local text = table.concat(shown)
    assert.is_truthy(text:find("\nWhat it does.\nMore.\n", 1, true))
    assert.is_truthy(text:find("  --lr          0.001  learning rate\n", 1, true))
    assert.is_truthy(text:find('  --data        ""     JSONL\n', 1, true))
    assert.is_truthy(text:find("  --fast        false\n", 1, true))
    assert.is_truthy(text:find("  --clip        none   number or none\n", 1, true))
    assert.is_truthy(text:find("\n  %-%-seed +0 "))
    -- The order is the source's.
    assert.is_true(text:find("--num_epochs", 1, true) < text:find("--data", 1, true))
  end)

  it("reads comments that go on, and leaves headings and strings alone", function()
    local shown = {}
    local columns = options.columns
    options.columns = function(keys)
      for _, key in ipairs(keys) do
        shown[key.name] = key.comment or ""
      end
      return ""
    end
    local write = io.write
    io.write = function() end -- luacheck: ignore 122
    pcall(
      run,
      [[
local liger = require("liger")
local config = liger.config {
  a = "-- no { comment", -- first
                         -- and on
  -- A heading.
  b = 2, c = 3, -- of c
  d = 4,
}
]],
      "--help"
    )
    io.write = write -- luacheck: ignore 122
    options.columns = columns
    assert.are.equal("first and on", shown.a)
    assert.are.equal("", shown.b)
    assert.are.equal("of c", shown.c)
    assert.are.equal("", shown.d)
  end)

  it("refuses a wrong table of options at the recipe's line", function()
    local function refuses(text, ...)
      helper.raises(function()
        run('local c = require("liger").config(' .. text .. ") return c")
      end, path .. ":1: config: ", ...)
    end
    refuses("3", "options are a number, wanted a table")
    refuses("{ lr = {} }", "lr is a table, wanted a number, a string or a boolean")
    refuses("{ 3 }", "key 1 is no name")
    refuses("{ lr = 1 }, { rl = { min = 0 } }", "constraint for rl, which is no key")
    refuses(
      "{ lr = 1 }, { lr = { least = 0 } }",
      "lr: constraint least, wanted min, max, above, whole, with, choice, also or a list"
    )
  end)

  it("knows defaults alone outside of a command", function()
    config.set_command(nil)
    assert.are.equal(1, config.new({ lr = 1 }).lr)
    assert.are.equal("run", config.recipe_name())
  end)
end)

describe("options.nearest", function()
  it("counts letters to change, takes - for _, and knows initials", function()
    local names = { "lr", "num_epochs", "max_new", "group" }
    assert.are.equal("num_epochs", options.nearest("num-epcohs", names))
    assert.are.equal("lr", options.nearest("learning_rate", names))
    assert.are.equal("max_new", options.nearest("Max-New-", names))
    assert.is_nil(options.nearest("x", {}))
  end)
end)

describe("options.parse", function()
  it("takes words where there may be some, and no value for a flag from them", function()
    local keys = { { name = "chat", default = false }, { name = "n", default = 1 } }
    local values, words = options.parse(keys, { "--chat", "true", "--n", "2", "--", "--n" }, 2)
    assert.is_true(values.chat)
    assert.are.equal(2, values.n)
    assert.are.same({ "true", "--n" }, words)
  end)

  it("takes a key that may stand alone", function()
    local function resume(...)
      local keys = {
        { name = "resume", default = false, alone = "true", comment = "path or none" },
        { name = "n", default = 1 },
      }
      local values, _, _, given = options.parse(keys, { ... })
      assert.are.equal(1, values.n)
      return values.resume, given.resume, given.n
    end
    assert.are.same({ "true", true }, { resume("--resume") })
    assert.are.same({ "true", true, true }, { resume("--resume", "--n", "1") })
    assert.are.same({ "", true }, { resume("--resume=") })
    assert.are.same({ "a", true }, { resume("--resume", "a") })
    assert.are.same({ false, true }, { resume("--resume", "none") })
    assert.are.same({ false }, { resume() })
  end)

  it("stops at --help", function()
    local _, _, help = options.parse({}, { "-h", "--wrong" })
    assert.is_true(help)
  end)
end)
