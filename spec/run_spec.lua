local helper = require("spec.helper")
local cjson = require("cjson")
local config = require("liger.train.config")
local fn = require("liger.fn")
local optim = require("liger.optim")
local memory = require("liger.memory")
local run_module = require("liger.train.run")
local Tensor = require("liger.tensor")

local root, run

local function open(name, more)
  local options = { out = root .. "/" .. (name or "a"), quiet = true }
  for key, value in pairs(more or {}) do
    options[key] = value
  end
  run = run_module.new(config.new(options))
  return run
end

local function lines(name)
  local list = {}
  for line in io.lines(run.folder .. "/" .. name) do
    list[#list + 1] = cjson.decode(line)
  end
  return list
end

-- io.popen's shell is a child of this process.
local function interrupt()
  io.popen("kill -INT $PPID"):close()
end

describe("run", function()
  before_each(function()
    root = os.tmpname()
    os.remove(root)
  end)
  after_each(function()
    run_module.finish_all()
    config.set_command(nil)
    os.execute("rm -rf '" .. root .. "'")
  end)

  describe("new", function()
    it("makes the folder with config.json", function()
      config.set_command({ recipe = "recipes/x.lua", args = { "--lr", "2" }, text = "liger run x" })
      open("deep/er", { lr = 1 })
      local text = helper.read(run.folder .. "/config.json")
      local stored = cjson.decode(text)
      assert.are.equal("recipes/x.lua", stored.recipe)
      assert.are.equal("liger run x", stored.command)
      assert.are.equal("string", type(stored.version))
      assert.matches("CPU threads", stored.device)
      assert.are.equal(2, stored.config.lr)
      assert.are.equal("f32", stored.config.dtype)
      assert.are.equal(root .. "/deep/er", stored.config.out)
      assert.are.same(
        { "config.json", "metrics.jsonl", "samples.jsonl" },
        helper.list(run.folder)
      )
    end)

    it("refuses a folder that holds a run", function()
      open("a"):finish()
      local ok, problem = pcall(open, "a")
      assert.is_false(ok)
      assert.are.equal(2, problem.code)
      assert.are.equal(
        ("--out: %s/a holds a run, name another folder, remove it, or go on with --resume"):format(
          root
        ),
        problem.message
      )
    end)

    it("takes the next free name where the folder was not named", function()
      local options = config.new({ quiet = true })
      options.out = root .. "/unnamed"
      config.default_out = options.out
      run = run_module.new(options)
      assert.are.equal(root .. "/unnamed", run.folder)
      local second = run_module.new(options)
      assert.are.equal(root .. "/unnamed-2", second.folder)
    end)

    it("says why there is no folder", function()
      assert.is_truthy(io.open(root, "w")):close()
      helper.raises(function()
        open("a")
      end, ("run: cannot make the folder %s/a: Not a directory"):format(root))
    end)

    it("wants what liger.config returned", function()
      helper.raises(function()
        run_module.new({})
      end, "run_spec.lua", "run: config is no table of liger.config")
    end)
  end)

  describe("steps", function()
    it("counts from 1 to n, and to config.steps without n", function()
      open("a", { steps = 2 })
      local seen = {}
      for step in run:steps(3) do
        seen[#seen + 1] = step
        assert.are.equal(step, run.step)
      end
      for step in run:steps() do
        seen[#seen + 1] = step
      end
      for step in run:steps(0) do
        seen[#seen + 1] = step
      end
      assert.are.same({ 1, 2, 3, 1, 2 }, seen)
    end)

    it("frees what a step made and did not keep", function()
      open()
      local before = memory.stats().live
      local first, kept
      for step in run:steps(3) do
        local x = fn.zeros(1000)
        first = first or x
        if step == 2 then
          assert.is_true(first.storage.dead)
          kept = fn.ones(10):keep()
        end
      end
      assert.is_nil(kept.storage.dead)
      assert.are.equal(kept.storage.bytes, memory.stats().live - before)
      memory.release(kept.storage)
    end)

    it("keeps memory flat over many steps", function()
      open()
      collectgarbage() -- what earlier specs left
      collectgarbage()
      local before = memory.stats().live
      memory.reset_peak()
      local peak
      for step in run:steps(300) do
        local x = fn.ones(4096) + step
        run:log({ loss = fn.sum(x) })
        if step == 3 then
          peak = memory.stats().peak
        end
      end
      assert.are.equal(peak, memory.stats().peak)
      assert.are.equal(before, memory.stats().live)
    end)

    it("frees the step of a loop that was left, when the next begins and at the end", function()
      open()
      local x, y
      for _ in run:steps(3) do
        x = x or fn.zeros(10)
        if x then
          break
        end
      end
      assert.is_nil(x.storage.dead)
      for _ in run:steps(3) do
        assert.is_true(x.storage.dead)
        y = y or fn.zeros(10)
        if y then
          break
        end
      end
      run:finish()
      assert.is_true(y.storage.dead)
      assert.is_false(memory.in_scope())
    end)

    it("ends after the step that calls stop, and leaves no memory open", function()
      open()
      local seen, x = 0, nil
      for step in run:steps(5) do
        x, seen = x or fn.zeros(10), step
        if step == 2 then
          run:stop()
        end
      end
      assert.are.equal(2, seen)
      assert.is_true(x.storage.dead)
      local between = fn.zeros(10)
      for step in run:steps(2) do
        seen = step
      end
      assert.are.equal(2, seen)
      run:phase("next")
      run:finish()
      assert.is_nil(between.storage.dead)
    end)

    it("wants a whole number", function()
      open()
      for _, n in ipairs({ -1, 1.5, "3" }) do
        helper.raises(function()
          run:steps(n)
        end, "run_spec.lua", ("steps: n is %s, wanted a whole number from 0"):format(n))
      end
      helper.raises(function()
        run:steps()
      end, "steps: n is nil, wanted a whole number from 0")
    end)
  end)

  it("parts gives all rows in parts, frees what each made, and ends at an interrupt", function()
    open()
    local sizes, made = {}, {}
    for part in run:parts({ 1, 2, 3, 4, 5 }, 2, "held-out") do
      sizes[#sizes + 1], made[#made + 1] = #part, fn.zeros(3)
    end
    assert.are.same({ 2, 2, 1 }, sizes)
    assert.is_true(made[3].storage.dead)
    assert.is_false(memory.in_scope())
    for _ in run:parts({}, 2, "held-out") do
      error("there is none")
    end
    run.print = function(_, text)
      run.printed = (run.printed or "") .. text
    end
    for part in run:parts({ 1, 2, 3 }, 1, "held-out") do
      sizes = part
      interrupt()
    end
    assert.are.same({ 1 }, sizes)
    assert.is_true(run.should_stop())
    assert.are.equal("interrupted: ends after this step; again to stop at once", run.printed)
  end)

  describe("save", function()
    it("is tried before the run begins", function()
      assert.is_truthy(io.open(root, "w")):close()
      local ok, problem = pcall(open, nil, { out = root .. "-run", save = root .. "/model" })
      assert.is_false(ok)
      assert.are.equal(2, problem.code)
      local wanted = "--save: %s/model: cannot be made: Not a directory"
      assert.are.equal(wanted:format(root), problem.message)
      assert.is_false(helper.exists(root .. "-run"))
    end)

    it("does nothing where it was not asked for", function()
      open("a", { save = "" })
      run:save(nil)
      open("b")
      run:save(nil)
    end)

    it("never mixes a model with another", function()
      os.execute(("mkdir -p %s/old && touch %s/old/config.json"):format(root, root))
      local ok, problem = pcall(open, nil, { out = root .. "/run", save = root .. "/old" })
      assert.is_false(ok)
      assert.are.equal(("--save: %s/old holds a model already, wanted a new or an empty folder")
        :format(root), problem.message)
    end)
  end)

  describe("log", function()
    it("writes a line a step: numbers, one-element tensors, sorted keys", function()
      open()
      for step in run:steps(2) do
        run:log({ loss = Tensor.from_table({ 0.1 }), b = step, a = 1e-7, gone = nil })
      end
      local list = lines("metrics.jsonl")
      assert.are.equal(2, #list)
      assert.are.equal(2, list[2].step)
      assert.are.equal(2, list[2].b)
      assert.are.equal("number", type(list[2].step_time))
      assert.is_nil(list[2].phase)
      local text = helper.read(run.folder .. "/metrics.jsonl")
      assert.is_truthy(
        text:match('^{"a":1e%-07,"b":1,"loss":0%.100000001,"step":1,"step_time":[%d.e-]+}\n')
      )
    end)

    it("adds the phase, and tokens_per_second where there are tokens", function()
      open()
      for _ in run:steps(1, { label = "warm-up" }) do
        run:log({ tokens = 100 })
      end
      run:phase("grpo")
      for _ in run:steps(1) do
        run:log({ reward = 1 })
      end
      local list = lines("metrics.jsonl")
      assert.are.equal("warm-up", list[1].phase)
      assert.are.equal("grpo", list[2].phase)
      local speed = 100 / list[1].step_time
      helper.close(list[1].tokens_per_second / speed, 1, 1e-6)
      assert.is_nil(list[2].tokens_per_second)
    end)

    it("adds up the loop's tokens, unless it is told how many", function()
      open()
      for label, wanted in pairs({ a = { 5, 10 }, b = { 5, 10 } }) do
        for step in run:steps(2, { label = label }) do
          run:log({ tokens = 5 })
          local list = lines("metrics.jsonl")
          assert.are.equal(wanted[step], list[#list].num_tokens)
        end
      end
      run:log({ tokens = 5, num_tokens = 1 })
      run:log({ loss = 1 })
      local list = lines("metrics.jsonl")
      assert.are.equal(1, list[5].num_tokens)
      assert.is_nil(list[6].num_tokens)
    end)

    it("refuses what is no number", function()
      open()
      helper.raises(function()
        run:log({ reward = "high" })
      end, "log: reward is a string, wanted a number or a tensor of one element")
      helper.raises(function()
        run:log({ reward = fn.zeros(2, 3) })
      end, "log: reward is [2,3], wanted one element")
      helper.raises(function()
        run:log({ step = 3 })
      end, "run_spec.lua", "log: step is the run's own, choose another name")
      assert.are.same({}, lines("metrics.jsonl"))
    end)

    it("stops at a loss or grad_norm that is not finite, after its line", function()
      for name, value in pairs({ loss = 0 / 0, grad_norm = math.huge }) do
        open(name)
        helper.raises(function()
          for step in run:steps(5) do
            run:log({ [name] = step == 3 and value or 1 })
          end
        end, ("step 3: %s is %s"):format(name, name == "loss" and "nan" or "inf"))
        local list = lines("metrics.jsonl")
        assert.are.equal(3, #list)
        assert.are.equal(name == "loss" and "nan" or "inf", list[3][name])
      end
    end)

    it("goes on when another metric is not finite", function()
      open()
      run:log({ kl = 0 / 0 })
      assert.are.equal("nan", lines("metrics.jsonl")[1].kl)
    end)
  end)

  describe("watch", function()
    local function blames(wanted)
      helper.raises(function()
        run:log({ loss = 0 / 0 })
      end, "step 0: loss is nan; the first tensor with NaN or Inf is " .. wanted)
    end

    it("names the first tensor that is not finite", function()
      open()
      run:watch("ids", Tensor.from_table({ 1, 2 }, "i32"))
      run:watch("embed", Tensor.from_table({ 1, 2 }))
      run:watch("norm", Tensor.from_table({ 1, -math.huge }, "bf16"))
      run:watch("head", Tensor.from_table({ 0 / 0, 2 }))
      blames("norm")
    end)

    it("looks at all values before the gradients, also of a model's parameters", function()
      open()
      local w = Tensor.from_table({ 1, 2 }):requires_grad_()
      fn.sum(w * Tensor.from_table({ 1, math.huge })):backward()
      run:watch({ { name = "w", tensor = w } })
      helper.raises(function()
        run:check({ loss = 0 / 0 })
      end, "step 0: loss is nan; the first tensor with NaN or Inf is gradient of w")
      run:watch({ { name = "v", tensor = Tensor.from_table({ 0 / 0 }) } })
      blames("v")
      run:check({ loss = 1, grad_norm = 2 })
    end)

    it("B95: names the gradient that the optimiser's step was skipped for", function()
      open()
      local list = {}
      for i, factor in ipairs({ 1, math.huge, 0 / 0 }) do
        local w = Tensor.from_table({ 1, 2 }):requires_grad_()
        fn.sum(w * factor):backward()
        list[i] = { name = "w" .. i, tensor = w }
      end
      run:watch(list)
      local optimizer = optim.adamw(list)
      local norm = optimizer:step()
      assert.same({ 0, 0 }, list[2].tensor.grad:to_table()) -- it is gone by now
      helper.raises(function()
        run:log({ loss = 1, grad_norm = norm })
      end, "step 0: grad_norm is nan; the first tensor with NaN or Inf is gradient of w2")
      optimizer:step()
      run:log({ loss = 1, grad_norm = 0 })
    end)

    it("looks at gradients, strided views and f16", function()
      open()
      local w = Tensor.from_table({ 1, 2 }):requires_grad_()
      fn.sum(w * Tensor.from_table({ 1, math.huge })):backward()
      run:watch("w", w)
      blames("gradient of w")
      open("b")
      local x = Tensor.from_table({ { 1, 2, 0 / 0 }, { 3, 4, 5 } })
      run:watch("left", x:narrow(2, 1, 2))
      run:watch("half", Tensor.from_table({ 1, math.huge }, "f16"))
      blames("half")
    end)

    it("says nothing of it when all are finite", function()
      open()
      run:watch("w", Tensor.from_table({ 1 }))
      local message = helper.raises(function()
        run:log({ loss = 0 / 0 })
      end, "step 0: loss is nan")
      assert.is_nil(message:find(";", 1, true))
    end)
  end)

  it("once calls a function once, by name", function()
    open()
    local calls = 0
    local function count()
      calls = calls + 1
      return calls
    end
    local first, again = run:once("a", count), run:once("a", count)
    assert.are.same({ 1, 1, 2 }, { first, again, run:once("b", count) })
    assert.are.equal(2, calls)
  end)

  it("sample writes a line with step and phase", function()
    open()
    for _ in run:steps(1, { label = "grpo" }) do
      run:sample({ prompt = "a\n\255", ids = { 1, 2 }, logp = { 0.5 }, reward = 1 })
    end
    assert.are.same({
      prompt = "a\n\239\191\189",
      ids = { 1, 2 },
      logp = { 0.5 },
      reward = 1,
      step = 1,
      phase = "grpo",
    }, lines("samples.jsonl")[1])
  end)

  it("an interrupt ends the loop after its step, and those that follow", function()
    open()
    local seen = 0
    run.print = function(_, text)
      run.printed = text
    end
    for step in run:steps(5) do
      seen = step
      if step == 2 then
        interrupt()
      end
    end
    for _ in run:steps(5) do
      seen = "went on"
    end
    assert.are.equal(2, seen)
    assert.is_true(run.interrupted)
    assert.are.equal("interrupted after step 2", run.printed)
    assert.is_true(run_module.finish_all())
    assert.is_false(run_module.finish_all())
  end)

  it("names its folder at the end, but not before an error", function()
    for name, failed in pairs({ ended = false, failed = true }) do
      open(name)
      run.config.quiet = false
      local printed = {}
      run.print = function(_, text)
        printed[#printed + 1] = text
      end
      run_module.finish_all(failed)
      assert.is_true(run.finished)
      assert.equal(failed and 0 or 1, #printed)
    end
  end)

  it("finish may be called twice, and ends the loop", function()
    open()
    local seen
    for step in run:steps(5) do
      seen = step
      run:finish()
      run:finish()
    end
    assert.are.equal(1, seen)
  end)
end)
