-- A file without rows and a row without its columns, in every reader: one style.
local helper = require("spec.helper")
local column = require("liger.data.column")
local preference = require("liger.data.preference")
local prompts = require("liger.data.prompts")
local teacher = require("liger.data.teacher")

local tokenizer = {
  encode = function(_, text)
    return { text:byte(1, -1) }
  end,
}

local SAMPLES = { { ids = { 1 }, completion = { 1, 2 }, row = { _line = 1 } } }

local READERS = {
  prompts = function(path)
    return prompts.load(path, tokenizer)
  end,
  supervised = function(path)
    return prompts.supervised(path, tokenizer, 99)
  end,
  pairs = function(path)
    return preference.pairs(path, tokenizer, {})
  end,
  labelled = function(path)
    return preference.labelled(path, tokenizer, {})
  end,
  teacher = function(path)
    return teacher.load(path, SAMPLES, 9)
  end,
}

local function refused(reader, text, ...)
  local path, wanted = os.tmpname(), { ... }
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
  wanted[1] = path .. wanted[1]
  helper.raises(function()
    READERS[reader](path)
  end, unpack(wanted))
  os.remove(path)
end

describe("a reader of data", function()
  it("refuses a file without rows", function()
    for name in pairs(READERS) do
      for _, text in ipairs({ "", "\n \n" }) do
        refused(name, text, ": there are no rows, wanted one object a line")
      end
    end
  end)

  it("names line and column of what is missing, and what was wanted", function()
    local message = "a string or a list of messages"
    for _, case in ipairs({
      { "prompts", "columns `prompt` and `messages` are missing, wanted one of them; there " },
      { "supervised", "columns `text`, `messages`, `prompt` and `completion` are missing, w" },
      { "pairs", "column `chosen` is missing, wanted " .. message },
      { "labelled", "column `prompt` is missing, wanted " .. message },
      { "teacher", "column `ids` is missing, wanted a list for each of 2 completion tokens" },
    }) do
      refused(case[1], '{"x": 1}', ":1: " .. case[2])
    end
  end)

  it("tells an object from a list of messages", function()
    refused("supervised", '{"messages": {"role": "user", "content": "a"}}',
      ":1: column `messages` is an object, wanted a list of messages")
    refused("supervised", '{"messages": []}',
      ":1: column `messages` is empty, wanted at least one message")
  end)
end)

describe("a column", function()
  it("is said to be of its type", function()
    for _, case in ipairs({
      { nil, "missing" }, { "x", "a string" }, { 1, "a number" }, { true, "a boolean" },
      { {}, "a list" },
    }) do
      local value, got = case[1], case[2]
      local wanted = ("column `c` is %s, wanted true or false"):format(got)
      if value ~= true then
        assert.equal(wanted, column.problem({ c = value }, "c", "boolean"))
      end
      assert.equal(("column `c` is %s, wanted x"):format(got), column.is_wrong("c", value, "x"))
    end
  end)
end)
