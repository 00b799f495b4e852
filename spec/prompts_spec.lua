local helper = require("spec.helper")
local prompts = require("liger.data.prompts")
local reward = require("liger.rollout.reward")
local tokenizer = require("liger.data.tokenizer")

-- A file of the rows' JSON, for as long as `each` runs.
local function with_rows(lines, each)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write(table.concat(lines, "\n"), "\n")
  file:close()
  local ok, message = pcall(each, path)
  os.remove(path)
  if not ok then
    error(message, 0)
  end
end

local TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
  .. "{% if add_generation_prompt %}<assistant>{% endif %}"

-- Bytes with a chat template; byte 0 ends a text.
local function new_tokenizer(template)
  local bytes = tokenizer.bytes()
  bytes.chat_template = template or TEMPLATE
  bytes.eos_id = 0
  return bytes
end

local function text_of(ids)
  local y = {}
  for i, id in ipairs(ids) do
    y[i] = string.char(id)
  end
  return table.concat(y)
end

describe("prompts of a file", function()
  it("are checked for what the reward needs and for the model's length", function()
    with_rows({
      '{"prompt": "2+2=", "answer": "4"}', "", '{"prompt": "1234567890"}',
    }, function(path)
      helper.raises(function()
        prompts.load(path, new_tokenizer(), { check = reward.new("exact").check })
      end, path .. ":3: column `answer` is missing, wanted a string or a number")
      helper.raises(function()
        prompts.load(path, new_tokenizer(), { context = 13, max_completion_length = 4 })
      end, path .. ":3: column `prompt` has 10 tokens and max_completion_length is 4, wanted at "
        .. "most 13")
      assert.equal(2, #prompts.load(path, new_tokenizer(), {
        context = 14, max_completion_length = 4,
      }))
    end)
  end)

  it("are encoded, their columns kept", function()
    with_rows({
      '{"prompt": "2+2=", "answer": "4", "level": 3}',
      '{"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}',
      '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    }, function(path)
      local rows = prompts.load(path, new_tokenizer())
      assert.equal(3, #rows)
      assert.equal("2+2=", text_of(rows[1].ids))
      assert.equal("4", rows[1].answer)
      assert.equal(3, rows[1].level)
      assert.equal("<user>hi|<assistant>", text_of(rows[2].ids))
      assert.equal("<user>a|<assistant>", text_of(rows[3].ids))
    end)
  end)

  it("are refused by their row where they are chats and there is no template", function()
    local chat = '{"role": "user", "content": "hi"}'
    local plain = tokenizer.bytes()
    with_rows({
      '{"prompt": "2+2="}', ('{"prompt": [%s], "completion": [%s]}'):format(chat, chat),
    }, function(path)
      local wanted = path
        .. ":2: the row is a chat, wanted texts: the tokenizer has no chat template"
      assert.equal(wanted, select(2, pcall(prompts.load, path, plain)))
    end)
    with_rows({ ('{"messages": [%s]}'):format(chat) }, function(path)
      local wanted = path
        .. ":1: the row is a chat, wanted texts: the tokenizer has no chat template"
      assert.equal(wanted, select(2, pcall(prompts.supervised, path, plain, 100)))
    end)
  end)

  it("are refused where they encode to nothing", function()
    with_rows({
      '{"prompt": "a"}', '{"prompt": [{"role": "user", "content": "a"}]}',
    }, function(path)
      helper.raises(function()
        prompts.load(path, new_tokenizer("{{ '' }}"))
      end, path .. ":2: column `prompt` is empty, wanted at least one token")
    end)
  end)
end)

describe("supervised samples of a file", function()
  local function load(lines, max_length, template, answers)
    local samples
    with_rows(lines, function(path)
      samples = prompts.supervised(path, new_tokenizer(template), max_length or 1000, nil, answers)
    end)
    return samples
  end

  it("learn the last answer of a chat alone, where that is asked for", function()
    local chat = '{"messages": [{"role": "user", "content": "q"}, '
      .. '{"role": "assistant", "content": "an"}]}'
    local samples = load({ chat, '{"text": "ab"}' }, nil, nil, true)
    assert.equal("<user>q|<assistant>", text_of(samples[1].ids))
    assert.equal("an|", text_of(samples[1].completion))
    assert.equal("b\0", text_of(samples[2].completion))
    assert.equal("<", text_of(load({ chat })[1].ids))
    helper.raises(function()
      load({ '{"messages": [{"role": "user", "content": "q"}]}' }, nil, nil, true)
    end, ":1: column `messages` ends with a user after 0 others, wanted an answer of the assistant")
  end)

  it("learn the completion of a prompt, with the end", function()
    local samples = load({ '{"prompt": "2+2=", "completion": "4"}' })
    assert.equal("2+2=", text_of(samples[1].ids))
    assert.equal("4\0", text_of(samples[1].completion))
  end)

  it("learn the answer of a chat, as the template ends it", function()
    local samples = load({
      '{"prompt": [{"role": "user", "content": "q"}], '
        .. '"completion": [{"role": "assistant", "content": "an"}]}',
    })
    assert.equal("<user>q|<assistant>", text_of(samples[1].ids))
    assert.equal("an|", text_of(samples[1].completion))
  end)

  it("learn all of a text or a chat but its first token", function()
    local samples = load({
      '{"text": "abc"}',
      '{"text": "abc\\u0000"}',
      '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}',
    })
    assert.equal("a", text_of(samples[1].ids))
    assert.equal("bc\0", text_of(samples[1].completion))
    assert.equal("bc\0", text_of(samples[2].completion))
    assert.equal("<", text_of(samples[3].ids))
    assert.equal("user>q|<assistant>a|", text_of(samples[3].completion))
  end)

  it("are cut on the right, and left out where nothing remains", function()
    local lines = {
      '{"prompt": "12345", "completion": "6789"}', '{"text": "abcdef"}', '{"text": ""}',
    }
    local samples = load(lines, 7)
    assert.equal(2, #samples)
    assert.equal("67", text_of(samples[1].completion))
    assert.equal("bcdef\0", text_of(samples[2].completion))
    samples = load(lines, 5)
    assert.equal(1, #samples)
    assert.equal("a", text_of(samples[1].ids))
    assert.equal("bcde", text_of(samples[1].completion))
  end)

  it("are refused, with the line, for what cannot be learnt", function()
    local function refused(line, template, ...)
      local texts = { ... }
      with_rows({ '{"text": "fine"}', line }, function(path)
        helper.raises(function()
          prompts.supervised(path, new_tokenizer(template), 100)
        end, path .. ":2: ", unpack(texts))
      end)
    end
    refused('{"answer": "x"}', nil, "columns `text`, `messages`, `prompt` and `completion` are "
      .. "missing, wanted a text, messages, or a prompt and a completion; there are: answer")
    refused('{"prompt": "x"}', nil, "column `completion` is missing, wanted a string")
    refused('{"completion": "x"}', nil, "column `prompt` is missing, wanted a string or a ")
    refused('{"text": 5}', nil, "column `text` is a number, wanted a string")
    refused('{"messages": "x"}', nil, "column `messages` is a string, wanted a list of messages")
    refused(
      '{"prompt": 5, "completion": "x"}', nil,
      "column `prompt` is a number, wanted a string or a list of messages"
    )
    refused('{"prompt": "x", "completion": 5}', nil, "column `completion` is a number, wanted ")
    refused('{"prompt": [{"role": "user", "content": "q"}], "completion": "x"}', nil,
      "column `completion` is a string, wanted a list of messages")
    refused(
      '{"prompt": [{"role": "user", "content": "q"}], '
        .. '"completion": [{"role": "assistant", "content": "a"}]}',
      "{% if add_generation_prompt %}<open>{% endif %}"
        .. "{% for m in messages %}<{{ m.content }}>{% endfor %}",
      "the chat template changes the prompt when column `completion` follows, from token 2 on"
    )
  end)
end)

describe("supervised samples", function()
  it("have messages with role and content, and fit into the model", function()
    local function refused(row, context, message)
      with_rows({ "", row }, function(path)
        helper.raises(function()
          prompts.supervised(path, new_tokenizer(), 99, context)
        end, ("%s:2: %s"):format(path, message))
      end)
    end
    refused('{"messages": [{"content": "x"}]}', nil, "column `messages[1].role` is missing, want")
    refused('{"messages": []}', nil, "column `messages` is empty, wanted at least one message")
    refused(
      '{"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant"}]}', nil,
      "column `completion[1].content` is missing, wanted a string"
    )
    refused('{"prompt": [3], "completion": [{"role": "a", "content": "b"}]}', nil,
      "column `prompt[1]` is a number, wanted { role, content }")
    refused('{"text": "0123456789"}', 10, "the row has 11 tokens, wanted at most 10; max_length")
  end)
end)

describe("holding rows out", function()
  local function numbers(n)
    local list = {}
    for i = 1, n do
      list[i] = i
    end
    return list
  end

  it("puts every row on one side, by the seed", function()
    local rest, held_out = prompts.split(numbers(50), 0.1, 3)
    assert.equal(45, #rest)
    assert.equal(5, #held_out)
    local seen = {}
    for _, list in ipairs({ rest, held_out }) do
      for _, row in ipairs(list) do
        assert.is_nil(seen[row])
        seen[row] = true
      end
    end
    assert.same(held_out, select(2, prompts.split(numbers(50), 0.1, 3)))
    assert.are_not.same(held_out, select(2, prompts.split(numbers(50), 0.1, 4)))
  end)

  it("leaves at least one row on each side", function()
    for _, case in ipairs({ { 2, 0.01 }, { 2, 0.99 }, { 5, 1 }, { 5, 0 } }) do
      local rest, held_out = prompts.split(numbers(case[1]), case[2], 1)
      assert.is_true(#rest >= 1 and #held_out >= 1)
    end
  end)

  it("needs two rows", function()
    helper.raises(function()
      prompts.split({ 1 }, 0.1, 1, "d.jsonl")
    end, "d.jsonl: 1 row to learn from, wanted at least 2 to hold some out")
  end)
end)
