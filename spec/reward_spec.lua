local helper = require("spec.helper")
local reward = require("liger.rollout.reward")

local STOPPED, CUT = { stopped = true }, { stopped = false }

describe("the exact reward", function()
  local exact = reward.load("exact")

  it("is 1 for the answer, white space around it aside", function()
    assert.equal(1, exact("95", { answer = "95" }, STOPPED))
    assert.equal(1, exact(" 95\n", { answer = "95 " }, STOPPED))
    assert.equal(1, exact("95", { answer = 95 }, STOPPED))
    assert.equal(0, exact("9 5", { answer = "95" }, STOPPED))
    assert.equal(0, exact("955", { answer = "95" }, STOPPED))
    assert.equal(0, exact("", { answer = "95" }, STOPPED))
    assert.equal(1, exact("a b", { answer = "a b" }, STOPPED))
  end)

  it("can be called with text and row alone", function()
    assert.equal(1, exact("95", { answer = "95" }))
  end)

  it("is 0 for a completion that was cut", function()
    assert.equal(0, exact("95", { answer = "95" }, CUT))
  end)

  it("needs the row's answer", function()
    helper.raises(function()
      exact("95", { prompt = "x", _line = 7 }, STOPPED)
    end, "reward: row 7: column `answer` is missing, wanted a string or a number")
  end)
end)

describe("the numeric reward", function()
  local numeric = reward.load("numeric")

  it("compares the last numbers", function()
    for _, case in ipairs({
      { "The answer is 18.", "18", 1 },
      { "3 + 15 = 18", "#### 18", 1 },
      { "18 or 19", "18", 0 },
      { "no number", "18", 0 },
      { "", "18", 0 },
      { "18.0", "18", 1 },
      { "-3", "3", 0 },
      { "it is -3", "-3", 1 },
      { "0.5", "0.50", 1 },
      { "$1,234", "1234", 1 },
      { "1,234,567", "1234567", 1 },
      { "12,345,678.5 km", "12345678.5", 1 },
      { "(1, 2)", "2", 1 },
      { "1,2", "2", 1 },
      { "1,2345", "2345", 1 },
    }) do
      assert.equal(case[3], numeric(case[1], { answer = case[2] }), case[1] .. " / " .. case[2])
    end
    assert.equal(1, numeric("= 7", { answer = 7 }))
  end)

  it("needs an answer with a number", function()
    helper.raises(function()
      numeric("1", { answer = "none", _line = 3 })
    end, "reward: row 3: column `answer` is \"none\", wanted a number in it")
    helper.raises(function()
      numeric("1", {})
    end, "reward: row ?: column `answer` is missing")
  end)
end)

describe("several rewards", function()
  it("are named, weighted, and say what a row lacks", function()
    local rewards = reward.new("exact,numeric", "1,0.5")
    assert.same({ "exact", "numeric" }, rewards.names)
    assert.same({ 1, 0.5 }, rewards.weights)
    assert.equal(1, rewards.functions[2]("= 7", { answer = 7 }))
    assert.equal("column `answer` is missing, wanted a string or a number", rewards.check({}))
    assert.equal("column `answer` is a list, wanted a string or a number",
      rewards.check({ answer = {} }))
    assert.equal("column `answer` is \"x\", wanted a number in it", rewards.check({ answer = "x" }))
    assert.is_nil(rewards.check({ answer = "18" }))
    assert.is_nil(reward.new("exact", "").weights)
    assert.is_nil(reward.new("exact").check({ answer = "x" }))
  end)

  it("are refused when their weights or names do not fit", function()
    for _, weights in ipairs({ "1", "1,2,3", "1,x" }) do
      helper.raises(function()
        reward.new("exact,numeric", weights)
      end, ("reward: reward_weights is %s, wanted 2 numbers with commas between"):format(weights))
    end
    helper.raises(function()
      reward.new("exact,exact")
    end, "reward: two are named exact")
    helper.raises(function()
      reward.new("")
    end, "reward: none is named; wanted exact, numeric or a Lua file")
  end)
end)

describe("a reward of one's own", function()
  local function with_file(text, each)
    local path = os.tmpname() .. ".lua"
    local file = assert(io.open(path, "w"))
    file:write(text)
    file:close()
    local ok, message = pcall(each, path)
    os.remove(path)
    os.remove((path:gsub("%.lua$", "")))
    if not ok then
      error(message, 0)
    end
  end

  it("is the function that a Lua file returns", function()
    with_file("return function(text, row) return #text + row.bonus end", function(path)
      assert.equal(5, reward.load(path)("abc", { bonus = 2 }))
    end)
  end)

  it("is refused when the name, the file or what it returns is wrong", function()
    local function refused(name, ...)
      helper.raises(function()
        reward.load(name)
      end, ...)
    end
    refused("best", "reward: best is none; wanted exact, numeric or a Lua file")
    refused("/nowhere/reward.lua", "reward: cannot open /nowhere/reward.lua")
    with_file("return function(", function(path)
      refused(path, "reward: ", path, "expected")
    end)
    with_file("return { 1 }", function(path)
      refused(path, path .. " returned table, wanted a function(completion, row)")
    end)
    with_file("local x = 1", function(path)
      refused(path, path .. " returned nil, wanted a function")
    end)
    with_file("error('mine')", function(path)
      refused(path, path, "mine")
    end)
  end)
end)
