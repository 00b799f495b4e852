local helper = require("spec.helper")
local jsonl = require("liger.data.jsonl")
local json = require("liger.data.json")

local path

local function write(text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

local function read(text)
  write(text)
  return jsonl.read(path)
end

local function refuses(text, ...)
  write(text)
  helper.raises(function()
    jsonl.prompts(jsonl.read(path), path)
  end, ...)
end

describe("jsonl", function()
  before_each(function()
    path = os.tmpname()
  end)
  after_each(function()
    os.remove(path)
  end)

  describe("read", function()
    it("gives a row a line, with the line's number", function()
      local rows = read('{"prompt": "a", "n": [1, 2.5]}\n{"prompt": "b"}\n')
      assert.are.same(
        { { prompt = "a", n = { 1, 2.5 }, _line = 1 }, { prompt = "b", _line = 2 } },
        rows
      )
    end)

    it("skips empty lines and reads a last line without an end", function()
      local rows = read('\n  \n{"a": 1}\n\n{"a": 2}')
      assert.are.same({ { a = 1, _line = 3 }, { a = 2, _line = 5 } }, rows)
    end)

    it("takes off a byte order mark and CRLF", function()
      assert.are.same({ { a = "x", _line = 1 } }, read('\239\187\191{"a": "x"}\r\n\r\n'))
    end)

    it("leaves out columns that are null", function()
      local rows = read('{"a": {"b": 1, "c": null}, "d": null}')
      assert.are.same({ { a = { b = 1 }, _line = 1 } }, rows)
    end)

    it("gives no rows for an empty file", function()
      assert.are.same({}, read(""))
    end)

    it("names file, line and column of what is no JSON", function()
      refuses('{"a": 1}\n{"a": 1,}\n', path .. ":2:9: found }, wanted a key in quotes")
      refuses('{"a": 1', path .. ":1:8: found the end of the line, wanted , or }")
      refuses('{"a" 1}', path .. ":1:6: found a number, wanted :")
      refuses('{"a": NaN}', path .. ":1:7: found what is no JSON, wanted a value")
      refuses('{"a": 1} x', path .. ":1:10: found what is no JSON, wanted the end of the line")
    end)

    it("names the line of what is no object", function()
      refuses("\n3\n", path .. ":2: the line is a number, wanted an object")
      refuses("null\n", path .. ":1: the line is null, wanted an object")
      refuses('[\n{"a": 1}]', path .. ":1: a list starts here, wanted one object a line")
    end)

    it("refuses UTF-16", function()
      refuses("\255\254{\0}\0", path .. ":1: the file is UTF-16, wanted UTF-8")
    end)

    it("says which file is missing or is a folder", function()
      helper.raises(function()
        jsonl.read("/nowhere/rows.jsonl")
      end, "/nowhere/rows.jsonl: No such file or directory")
      helper.raises(function()
        jsonl.read("/tmp")
      end, "/tmp: Is a directory")
    end)
  end)

  describe("write", function()
    it("writes what read gives back", function()
      local rows = { { a = 'x"\n', _line = 1 }, { b = { 1, 2 }, c = false, _line = 2 } }
      jsonl.write(path, rows)
      assert.are.same(rows, jsonl.read(path))
    end)

    it("says where it cannot write", function()
      helper.raises(function()
        jsonl.write("/nowhere/rows.jsonl", {})
      end, "/nowhere/rows.jsonl: cannot be written: No such file or directory")
    end)
  end)

  describe("prompts", function()
    local function prompts(text)
      return jsonl.prompts(read(text), path)
    end

    it("keeps a prompt that is a string or messages, and other columns", function()
      local rows = prompts(
        '{"prompt": "a", "answer": 4}\n{"prompt": [{"role": "user", "content": "b"}]}'
      )
      assert.are.same({ prompt = "a", answer = 4, _line = 1 }, rows[1])
      assert.are.same({ { role = "user", content = "b" } }, rows[2].prompt)
    end)

    it("takes messages up to the answer, and leaves them", function()
      local turns = '{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}'
      local row = prompts('{"messages": [' .. turns .. "]}")[1]
      assert.are.same({ { role = "user", content = "a" } }, row.prompt)
      assert.are.equal(2, #row.messages)
      row = prompts('{"messages": [' .. turns .. ', {"role": "user", "content": "c"}]}')[1]
      assert.are.equal(3, #row.prompt)
    end)

    it("allows a turn of tool calls without content", function()
      local turn = '{"role": "assistant", "tool_calls": [{"name": "f"}]}'
      local row = prompts('{"prompt": [' .. turn .. ', {"role": "tool", "content": "1"}]}')[1]
      assert.are.equal(2, #row.prompt)
    end)

    it("says what a row lacks", function()
      refuses('{"b": 1, "a": 2}', path .. ":1: columns `prompt` and `messages` are missing, "
        .. "wanted one of them; there are: a, b")
      refuses("{}", "are missing, wanted one of them; there are: none")
      refuses(
        '{"prompt": 3}',
        path .. ":1: column `prompt` is a number, wanted a string or a list of messages"
      )
      refuses('{"prompt": ""}', path .. ":1: column `prompt` is empty, wanted a prompt")
      refuses(
        '{"messages": "a"}',
        path .. ":1: column `messages` is a string, wanted a list of messages"
      )
      refuses(
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        path .. ":1: column `messages` is empty, wanted a prompt"
      )
      refuses(
        '{"messages": [{"content": "a"}]}',
        ":1: column `messages[1].role` is missing, wanted a string"
      )
      refuses(
        '{"messages": [{"role": "user"}]}',
        ":1: column `messages[1].content` is missing, wanted a string"
      )
      refuses(
        '{"prompt": [{"role": "user", "content": 3}]}',
        ":1: column `prompt[1].content` is a number, wanted a string"
      )
    end)
  end)
end)

describe("json.encode", function()
  it("sorts keys and writes one line", function()
    assert.are.equal('{"a":[1,"x\\n"],"b":true,"c":{"d":[]}}', json.encode({
      b = true,
      c = { d = {} },
      a = { 1, "x\n" },
    }))
  end)

  it("writes numbers that read back the same, and integers without a point", function()
    for _, x in ipairs({ 0.1, 1e-6, 1 / 3, 123456789012, -2.5, 1e300 }) do
      assert.are.equal(x, tonumber(json.encode(x)))
    end
    assert.are.equal("123456789012", json.encode(123456789012))
    assert.are.equal("0.1", json.encode(0.1))
    assert.are.equal("0.100000001", json.encode(0.10000000149011612, 9))
  end)

  it("writes what is not finite as a string", function()
    assert.are.equal('["nan","inf","-inf"]', json.encode({ 0 / 0, math.huge, -math.huge }))
  end)

  it("replaces bytes that are no UTF-8", function()
    assert.are.equal('"h\195\169"', json.encode("h\195\169"))
    for _, bad in ipairs({ "\255", "\195", "\192", "\128" }) do
      assert.are.equal('"a\239\191\189b"', json.encode("a" .. bad .. "b"))
    end
    -- A surrogate and an overlong form are three bytes that do not belong together.
    assert.are.equal('"' .. ("\239\191\189"):rep(3) .. '"', json.encode("\237\160\128"))
    assert.are.equal('"' .. ("\239\191\189"):rep(3) .. '"', json.encode("\224\128\128"))
    assert.are.equal('"\240\159\153\130"', json.encode("\240\159\153\130"))
  end)

  it("refuses a function", function()
    helper.raises(function()
      json.encode({ f = print })
    end, "json: cannot write a function")
  end)
end)
