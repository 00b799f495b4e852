require("spec.helper")
local progress = require("liger.train.progress")

local now, out

local function display(columns, quiet)
  now, out = 0, {}
  return progress.new({
    write = function(text)
      out[#out + 1] = text
    end,
    clock = function()
      return now
    end,
    columns = columns and function()
      return columns
    end,
    quiet = quiet,
  })
end

local function facts(step, total, values)
  return { step = step, total = total or 600, values = values or { loss = 1 / step } }
end

local function text()
  return table.concat(out)
end

describe("progress", function()
  it("shows phase, step, metrics, speed, memory and time left", function()
    local p = display(nil)
    p:update({
      step = 10,
      total = 600,
      phase = "grpo",
      values = { reward = 0.41, loss = -0.012344, grad_norm = 1.25, other = 3 },
      tokens_per_second = 12345,
      live_bytes = 312 * 2 ^ 20,
      seconds_left = 250,
    })
    assert.are.equal(
      "grpo step 10/600  reward 0.41  loss -0.01234  grad_norm 1.25"
        .. "  12.3k tokens/s  312 MiB  4:10 left\n",
      text()
    )
  end)

  describe("piped", function()
    it("prints the first, then one in two seconds, and the last", function()
      local p = display(nil)
      for step = 1, 8 do
        now = step * 0.5
        p:update(facts(step, 8))
      end
      p:close()
      assert.are.equal(
        "step 1/8  loss 1\nstep 5/8  loss 0.2\nstep 8/8  loss 0.125\n",
        text()
      )
    end)

    it("prints every 50th of fast steps", function()
      local p = display(nil)
      for step = 1, 120 do
        p:update(facts(step, 120, {}))
      end
      assert.are.equal("step 1/120\nstep 51/120\nstep 101/120\nstep 120/120\n", text())
    end)

    it("prints the last step of a loop that was left early, once", function()
      local p = display(nil)
      p:update(facts(1, 9, {}))
      p:update(facts(2, 9, {}))
      p:close()
      p:close()
      assert.are.equal("step 1/9\nstep 2/9\n", text())
    end)

    it("prints text as a line", function()
      local p = display(nil)
      p:update(facts(1, 9, {}))
      p:print("hello")
      assert.are.equal("step 1/9\nhello\n", text())
    end)
  end)

  describe("on a terminal", function()
    it("rewrites one line, at most ten times a second", function()
      local p = display(80)
      for step = 1, 5 do
        now = step * 0.04
        p:update(facts(step, 9, {}))
      end
      assert.are.equal("step 1/9\r\27[Kstep 4/9", text())
      p:update(facts(9, 9, {}))
      p:close()
      assert.are.equal("step 1/9\r\27[Kstep 4/9\r\27[Kstep 9/9\r\27[Kstep 9/9\n", text())
    end)

    it("leaves out what does not fit the width", function()
      local p = display(30)
      p:update(facts(1, 9, { reward = 0.5, loss = 0.25, grad_norm = 2 }))
      assert.are.equal("step 1/9  reward 0.5", text())
      p = display(10)
      p:update({ step = 100, total = 20000, phase = "warm-up", values = {} })
      assert.are.equal(10, #text())
    end)

    it("prints text above the line", function()
      local p = display(80)
      p:update(facts(1, 9, {}))
      p:print("hello")
      assert.are.equal("step 1/9\r\27[Khello\nstep 1/9", text())
    end)
  end)

  it("shows nothing but print when quiet", function()
    for _, columns in ipairs({ 80, false }) do
      local p = display(columns or nil, true)
      p:update(facts(1, 1))
      p:print("hello")
      p:close()
      assert.are.equal("hello\n", text())
    end
  end)

  it("writes durations", function()
    assert.are.equal("0:00", progress.duration(0.4))
    assert.are.equal("0:05", progress.duration(4.6))
    assert.are.equal("10:00", progress.duration(600))
    assert.are.equal("1:02:03", progress.duration(3723))
  end)
end)
