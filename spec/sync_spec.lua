-- How often a training step waits for its device. A read of what an op made is such a wait, and
-- counts as one on the CPU too.
require("spec.helper")
local config = require("liger.train.config")
local fn = require("liger.fn")
local lib = require("liger.ffi")
local liger = require("liger")
local memory = require("liger.memory")
local ops = require("liger.ops")
local Tensor = require("liger.tensor")

local function syncs()
  return memory.stats().syncs
end

-- What fn adds to the count.
local function waits(run, ...)
  local before = syncs()
  run(...)
  return syncs() - before
end

describe("a wait for the device", function()
  local x

  before_each(function()
    x = fn.ones(3) + 1
  end)

  it("is a read of what an op made", function()
    for _, name in ipairs({ "read", "to_table" }) do
      assert.equal(1, waits(x[name], x), name)
    end
    assert.equal(1, waits(function() return fn.sum(x):item() end))
    assert.equal(1, waits(tostring, x))
    assert.equal(1, waits(Tensor.read_all, { x, x, x }))
    assert.equal(0, waits(function() return fn.sum(x * x) end))
  end)

  it("is none where the host knows the values", function()
    local t = Tensor.stage({ 2 }, "f32")
    t:data()[0], t:data()[1] = 1, 2
    assert.equal(0, waits(t.read, t))
    assert.equal(0, waits(t.to_table, Tensor.from_table({ 1, 2 })))
    fn.sum(t)
    assert.equal(0, waits(t.read, t))
    t:fill_(3)
    assert.equal(1, waits(t.read, t))
    -- Nor do others know what a view's own storage holds.
    local u = Tensor.from_table({ 1, 2 })
    assert.equal(1, waits(u.to_table, u:narrow(1, 1, 1)))
  end)
end)

describe("values read together", function()
  it("stand end to end", function()
    local a, b = fn.full(1, 2, 2), Tensor.from_table({ 2, 3 })
    local data = Tensor.read_all({ a, b, a })
    for i, value in ipairs({ 1, 1, 1, 1, 2, 3, 1, 1, 1, 1 }) do
      assert.equal(value, data[i - 1])
    end
    assert.equal(3, Tensor.read_all({ b })[1])
  end)
end)

describe("a recipe's step", function()
  local root, count

  setup(function()
    root, count = os.tmpname(), 0
    os.remove(root)
    assert(os.execute(("mkdir %q"):format(root)))
  end)

  teardown(function()
    os.execute(("rm -r %q"):format(root))
  end)

  local HEADS = {
    "linear_logprob", "linear_logprob_backward", "linear_cross_entropy", "linear_distill",
    "linear_distill_topk",
  }

  -- Until the function that it gives is called: a head's forward is told how many rows take part,
  -- which on a GPU spares it a wait. Of a backward the GPU alone knows their number, and the host
  -- waits for it once. call(name, n) after a head that waited n times.
  local function watch_heads(call)
    local raw = {}
    for _, name in ipairs(HEADS) do
      local head, at = ops.raw[name], nil
      for i, p in ipairs(ops.schema[name].params) do
        at = p.name == "kept" and i or at
      end
      raw[name] = head
      ops.raw[name] = function(...)
        local before = syncs()
        head(...)
        assert.is_true(not at or (select(at, ...)) >= 0, name .. " is not told its rows")
        assert.equal((lib.on_cpu or at) and 0 or 1, syncs() - before, name)
        call(name, syncs() - before)
      end
    end
    return function()
      for name, head in pairs(raw) do
        ops.raw[name] = head
      end
    end
  end

  -- The waits of each step of a phase, without those of `rollouts:complete` and of the heads'
  -- backwards; how often each head ran.
  local function waits_of(recipe, phase, ...)
    count = count + 1
    local steps, calls, outside, last = {}, {}, 0, nil
    local restore = watch_heads(function(name, n)
      calls[name] = (calls[name] or 0) + 1
      outside = outside + n
    end)
    local new_run, new_rollouts = liger.run, liger.rollouts
    liger.run = function(...)
      local run = new_run(...)
      local log = run.log
      function run.print() end
      function run.log(self, ...)
        log(self, ...)
        if self.phase_name == phase and last then
          steps[#steps + 1] = syncs() - last - outside
        end
        last, outside = syncs(), 0
      end
      return run
    end
    liger.rollouts = function(...)
      local rollouts = new_rollouts(...)
      local complete = rollouts.complete
      function rollouts.complete(...)
        local before = syncs()
        local results = { complete(...) }
        outside = outside + syncs() - before
        return unpack(results)
      end
      return rollouts
    end
    config.set_command({
      recipe = recipe, text = "",
      args = { "--quiet", "--out", root .. "/" .. count, "--eval-rows", "4", ... },
    })
    local ok, problem = pcall(loadfile(("recipes/%s.lua"):format(recipe)))
    config.set_command(nil)
    liger.run, liger.rollouts = new_run, new_rollouts
    restore()
    memory.reset()
    assert(ok, type(problem) == "table" and problem.message or problem)
    return steps, calls
  end

  local function write(name, text)
    local file = assert(io.open(root .. "/" .. name, "w"))
    file:write(text)
    file:close()
    return root .. "/" .. name
  end

  local function grpo(...)
    local args = {
      "--prompts-per-step", "4", "--num-generations", "4", "--sft-until", "0", "--max-steps", "4",
      "--reward", write("short.lua", "return function(_, _, s) return #s.completion end"),
    }
    for _, word in ipairs({ ... }) do
      args[#args + 1] = word
    end
    local steps, calls = waits_of("grpo", "grpo", unpack(args))
    assert.equal(4, #steps)
    table.remove(steps, 1) -- the evaluation before it counts there
    return steps, calls
  end

  it("of SFT waits for the norm of its gradients and for its metrics, however it is cut", function()
    for _, tokens in ipairs({ "0", "60" }) do
      local steps, calls = waits_of("sft", "sft", "--max-steps", "4", "--batch-size", "16",
        "--micro-tokens", tokens)
      assert.same({ 2, 2, 2 }, steps)
      assert.is_true(calls.linear_cross_entropy >= 4)
      assert.is_nil(calls.linear_logprob_backward) -- no head's backward, which would wait
    end
  end)

  it("of GRPO waits for the same two, and in a GPU's backward once a head", function()
    local steps, calls = grpo("--micro-tokens", "0")
    assert.same({ 2, 2, 2 }, steps)
    assert.same({ 4, 4 }, { calls.linear_logprob, calls.linear_logprob_backward })
    assert.same({ 2, 2, 2 }, (grpo("--micro-tokens", "60")))
    assert.same({ 2, 2, 2 }, (grpo("--loss-type", "cispo", "--entropy-coef", "0.1")))
    -- The threshold of entropies is one more, the norm one an iteration.
    assert.same({ 3, 3, 3 }, (grpo("--top-entropy-quantile", "0.5")))
    assert.same({ 3, 3, 3 }, (grpo("--num-iterations", "2")))
  end)

  it("of a preference method waits for the same two, aot and KTO for their numbers", function()
    local function waits_in(recipe, ...)
      local steps, calls = waits_of(recipe, recipe, "--batch-size", "6", "--sft-until", "0",
        "--max-steps", "4", ...)
      table.remove(steps, 1)
      return steps, calls
    end
    for _, name in ipairs({ "dpo", "orpo", "cpo" }) do
      local steps, calls = waits_in(name, "--micro-tokens", "60")
      assert.same({ 2, 2, 2 }, steps, name)
      assert.is_true(calls.linear_logprob >= calls.linear_logprob_backward, name)
      assert.is_true(calls.linear_logprob_backward >= 4, name)
    end
    assert.same({ 2, 2, 2 }, (waits_in("dpo", "--use-weighting")))
    assert.same({ 2, 2, 2 }, (waits_in("kto", "--loss-type", "apo_zero_unpaired")))
    assert.same({ 3, 3, 3 }, (waits_in("kto", "--micro-tokens", "60")))
    assert.same({ 4, 4, 4 }, (waits_in("dpo", "--loss-type", "aot")))
  end)

  it("of distillation waits for the same two", function()
    local steps, calls = waits_of("distill", "distill", "--max-steps", "4", "--batch-size", "16",
      "--micro-tokens", "60", "--teacher-until", "0", "--lmbda", "0")
    table.remove(steps, 1)
    assert.same({ 2, 2, 2 }, steps)
    assert.is_true(calls.linear_distill >= 4)
  end)

  it("of GRPO waits no more with a loss of one's own", function()
    assert.same({ 2, 2, 2 }, (grpo("--loss",
      write("own.lua", "return function(batch, logp) return -(logp * batch.advantage) end"))))
  end)
end)
