-- Checkpoints and --resume, through the program: what comes after is what a straight run has, bit
-- for bit.
local helper = require("spec.helper")
local recipes = require("spec.recipe")
local cjson = require("cjson")

local with, write = recipes.with, recipes.write
local root, toy, count

-- A loop without a model that draws from each source of random numbers, and may end itself.
local TOY = [[
local liger = require("liger")
local config = liger.config({ max_steps = 8, lr = 0.5, data = "", size = false }, {
  size = { "small", "big" },
})
local function now(name, step)
  return os.getenv(name) == tostring(step)
end
local function interrupt()
  io.popen("kill -INT $PPID"):close()
end
local rows = {}
for i = 1, 8 do
  rows[i] = { id = i }
end
local run = liger.run(config)
local first = run:once("first", function()
  io.write("once\n")
  return 7
end)
for step in run:steps(2, { label = "before" }) do
  run:log({ draw = math.random() })
  if now("AHEAD", step) then
    interrupt()
  end
end
local weight = liger.tensor({ 0, 0, 0 }):requires_grad_()
local optimizer = liger.optim.adamw({ { name = "weight", tensor = weight } }, { lr = config.lr })
local data = liger.sampler.new(rows, config.seed)
local mine = { least = math.huge, ids = {}, text = "" }
run:keep({ data = data, mine = mine, optimizer = optimizer, weight = {
  state = function()
    return {}
  end,
  set_state = function() end,
  tensors = function()
    return { { name = "weight", tensor = weight } }
  end,
} })
for step in run:steps(config.max_steps, { label = "toy" }) do
  local batch = data:next(2)
  if now("EARLY", step) then
    interrupt()
    break
  end
  mine.least = math.min(mine.least, math.random())
  mine.ids[step], mine.text = batch[1].id, mine.text .. batch[2].id
  -- The last step has no gradient, and the moments move the weight.
  local loss = liger.fn.sum((weight - liger.randn(3)) ^ 2)
  if step < config.max_steps then
    loss:backward()
  end
  local norm = optimizer:step()
  if now("LATE", step) then
    interrupt()
    break
  end
  run:log({
    draw = math.random(), normal = liger.randn(1), first = batch[1].id, second = batch[2].id,
    least = mine.least, n = #mine.ids + #mine.text, tokens = 3, norm = norm, once = first,
    at = liger.fn.sum(weight),
  })
  run:sample({ text = mine.text })
  if now("KILL", step) then
    io.popen("kill -9 $PPID"):close()
  elseif now("INTERRUPT", step) then
    interrupt()
  elseif now("STOP", step) then
    run:stop()
  end
end
run:finish()
]]

setup(function()
  root, count = recipes.open(), 0
  toy = write("toy.lua", TOY)
end)

teardown(recipes.close)

local function folder()
  count = count + 1
  return ("%s/%d"):format(root, count)
end

-- Output and exit status of a file or recipe with options; true: an option without a value.
local function start(file, options, before)
  local words = {}
  for key, value in pairs(options) do
    words[#words + 1] = "--" .. key .. (value == true and "" or (" '%s'"):format(value))
  end
  local line = "(%s build/liger run '%s' --quiet %s) 2>&1; echo $?"
  local pipe = io.popen(line:format(before or "", file, table.concat(words, " ")))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.-)(%d+)\n$")
  return output, tonumber(status)
end

local function run(file, options, before)
  options = with({ out = not options.resume and folder() or nil }, options)
  local output, status = start(file, options, before)
  assert.equal(0, status, output)
  return options.out, output
end

-- The lines of a run without what is timed.
local function lines(out)
  local list = recipes.lines_of(out .. "/metrics.jsonl")
  for _, line in ipairs(list) do
    line.step_time, line.tokens_per_second = nil, nil
  end
  return list
end

local function checkpoints(out)
  local list = {}
  for _, name in ipairs(helper.list(out)) do
    list[#list + 1] = name:match("^checkpoint.*")
  end
  return list
end

-- Two runs have the same lines, samples and last checkpoint.
local function same(a, b, step)
  assert.same(lines(a), lines(b))
  assert.equal(helper.read(a .. "/samples.jsonl"), helper.read(b .. "/samples.jsonl"))
  local name = "/checkpoint-" .. step
  assert.same(helper.list(a .. name), helper.list(b .. name))
  for _, file in ipairs(helper.list(a .. name)) do
    local x, y = helper.read(a .. name .. "/" .. file), helper.read(b .. name .. "/" .. file)
    if file:find("%.safetensors$") then
      assert.is_true(x == y, file)
    elseif file == "trainer_state.json" then
      x, y = cjson.decode(x), cjson.decode(y)
      local timed = { config = 0, options = 0, sizes = 0, machine = 0 }
      assert.same(with(x, timed), with(y, timed))
    end
  end
end

local function copy(from, name)
  local to = folder()
  os.execute(("mkdir %s && cp -r %s/* %s"):format(to, from, to))
  return name and to .. "/" .. name or to
end

-- One line, and exit status 2.
local function refuses(options, wanted, file)
  local output, status = start(file or toy, options)
  assert.equal(2, status, output)
  assert.equal(("liger: --resume: %s\n"):format(wanted), output)
end

describe("--resume", function()
  local straight -- of 8 steps, a checkpoint after each

  setup(function()
    straight = run(toy, { ["save-steps"] = 1 })
  end)

  it("B92: goes on with the random numbers of each kind after a kill", function()
    local out = folder()
    local output, status = start(toy, { out = out, ["save-steps"] = 3 }, "KILL=5")
    assert.equal("once\n", output:gsub("Killed\n", ""))
    assert.equal(137, status)
    assert.equal(7, #lines(out)) -- 2 and 5
    local _, said = run(toy, { resume = out })
    assert.equal(("resumed from %s/checkpoint-3 (step 3)\n"):format(out), said)
    same(straight, out, 8)
    assert.same({ "checkpoint-3", "checkpoint-6", "checkpoint-8" }, checkpoints(out))
  end)

  it("B94: reads the rows of the straight run, each once an epoch", function()
    local longer = run(toy, { ["max-steps"] = 10 })
    local out = run(toy, { ["save-steps"] = 6, ["max-steps"] = 10 }, "STOP=6")
    run(toy, { resume = out })
    local seen = {}
    for i = 3, 10 do -- two epochs; steps 9 and 10 begin the third
      local line = lines(out)[i]
      seen[#seen + 1], seen[#seen + 2] = line.first, line.second
    end
    for epoch = 0, 1 do
      local once = {}
      for i = 1, 8 do
        once[seen[8 * epoch + i]] = true
      end
      assert.equal(8, #once)
    end
    same(longer, out, 10)
  end)

  it("goes on after Ctrl-C, which saves after its step whatever save_steps is", function()
    local out = folder()
    local output, status = start(toy, { out = out, ["save-steps"] = 0 }, "INTERRUPT=4")
    assert.equal(130, status)
    local wanted = "once\ninterrupted after step 4\nsaved %s/checkpoint-4; --resume %s goes on\n"
    assert.equal(wanted:format(out, out), output)
    assert.same({ "checkpoint-4" }, checkpoints(out))
    run(toy, { resume = out, ["save-steps"] = 1 })
    same(straight, out, 8)
  end)

  it("goes on from the step before one that Ctrl-C cut short", function()
    local out = folder()
    local output, status = start(toy, { out = out }, "EARLY=4")
    assert.equal(130, status)
    assert.matches("saved %S+/checkpoint%-3; ", output)
    run(toy, { resume = out, out = out .. "/" })
    same(straight, out, 8)
  end)

  it("saves no step that Ctrl-C cut short behind its update", function()
    local out = folder()
    local output, status = start(toy, { out = out, ["save-steps"] = 2 }, "LATE=4")
    assert.equal(130, status)
    assert.matches("\nnot saved: step 4 was under way\n", output)
    assert.same({ "checkpoint-2" }, checkpoints(out))
    run(toy, { resume = out })
    same(straight, out, 8)
  end)

  it("goes on to a step without a gradient, which the moments alone move", function()
    local out = folder()
    run(toy, { resume = straight .. "/checkpoint-7", out = out })
    same(straight, out, 8)
    assert.equal(0, lines(out)[10].norm)
    assert.is_true(lines(out)[10].at ~= lines(out)[9].at)
  end)

  it("changes nothing when Ctrl-C comes before the checkpoint was put back", function()
    local out = run(toy, { ["save-steps"] = 3 }, "STOP=5")
    local before = lines(out)
    local output, status = start(toy, { resume = out }, "AHEAD=1")
    assert.equal(130, status)
    assert.equal("interrupted after step 1\n", output)
    assert.same(before, lines(out))
    assert.same({ "checkpoint-3", "checkpoint-5" }, checkpoints(out))
    run(toy, { resume = out })
    same(straight, out, 8)
  end)

  it("takes a checkpoint into a folder of its own, and leaves the run as it was", function()
    local before = lines(straight)
    local out = folder()
    run(toy, { resume = straight .. "/checkpoint-5/", out = out })
    same(straight, out, 8)
    assert.same({ "checkpoint-6", "checkpoint-7", "checkpoint-8" }, checkpoints(out))
    assert.same(before, lines(straight))
  end)

  it("alone goes on in --out, and begins there when nothing was saved", function()
    local out = folder()
    local _, said = run(toy, { resume = true, out = out, ["save-steps"] = 3 })
    assert.equal(("%s has no checkpoint yet: begins at step 1\nonce\n"):format(out), said)
    same(straight, out, 8)
    start(toy, { out = out .. "b", ["save-steps"] = 6 }, "KILL=4")
    for _, value in ipairs({ "true", "" }) do
      local again = copy(out .. "b")
      _, said = run(toy, { resume = value, out = again })
      assert.equal(("%s has no checkpoint yet: begins at step 1\nonce\n"):format(again), said)
      same(straight, again, 8)
      local old = helper.read(again .. "/metrics.jsonl.old")
      assert.equal(helper.read(out .. "b/metrics.jsonl"), old)
    end
    refuses({ resume = true, out = out .. "b" },
      out .. "b has no checkpoint and is of the recipe toy, this is other2",
      write("other2.lua", TOY))
    start(toy, { out = out .. "c", ["save-steps"] = 3 }, "KILL=4")
    _, said = run(toy, { ["resume-from-checkpoint"] = true, out = out .. "c" })
    assert.matches("^resumed from %S+/checkpoint%-3 %(step 3%)\n$", said)
    same(straight, out .. "c", 8)
  end)

  it("trains on for more steps, and does nothing at the end of all", function()
    local out = run(toy, { ["save-steps"] = 5, ["max-steps"] = 5 })
    run(toy, { resume = out })
    assert.same({ "checkpoint-5" }, checkpoints(out))
    assert.equal(7, #lines(out))
    run(toy, { resume = out, ["max-steps"] = 7 })
    assert.same({ "checkpoint-5", "checkpoint-7" }, checkpoints(out))
    assert.equal(9, #lines(out))
  end)

  it("needs a recipe that keeps something", function()
    local path = write("keepless.lua", TOY:gsub("run:keep", "local _ = (function() end)"))
    local saved = write("toy.lua", TOY)
    local out = folder()
    os.execute(("mkdir %s/x && cp %s %s/x/toy.lua"):format(root, path, root))
    local output, status = start(root .. "/x/toy.lua", {
      resume = straight .. "/checkpoint-2", out = out,
    })
    assert.equal(1, status)
    assert.equal("liger: run: --resume found nothing to put back: "
      .. "the recipe calls no run:keep before a loop\n", output)
    assert.equal(toy, saved)
  end)
end)

-- Each recipe in four steps or more, and from its checkpoint after half of them.
describe("--resume gives the bits of the straight run in", function()
  local OPTIONS = {
    ["max-steps"] = 4, ["save-steps"] = 2, seed = 1, ["eval-rows"] = 5, ["warmup-steps"] = 1,
  }
  local SUMS = with(OPTIONS, { ["batch-size"] = 8, ["micro-tokens"] = 40 })
  local GRPO = with(OPTIONS, {
    ["sft-until"] = 0, ["prompts-per-step"] = 4, ["num-generations"] = 4, ["micro-tokens"] = 60,
  })

  local function resumes(recipe, options, wanted)
    local straight, output = run(recipe, options)
    local out, half = folder(), options["save-steps"]
    local last = 2 * half
    local from = ("%s/checkpoint-%d"):format(straight, half)
    local _, said = run(recipe, { resume = from, out = out, threads = 1, ["save-steps"] = last })
    local wanted_line = ("resumed from %s (step %d)\n"):format(from, half)
    assert.is_truthy(said:find(wanted_line, 1, true), said)
    same(straight, out, last)
    -- What the recipe says of the held-out rows too.
    assert.equal(output:match("held%-out [^\n]*before.*$"), said:match("held%-out [^\n]*before.*$"))
    assert.is_truthy(output:find("held-out " .. wanted, 1, true), output)
    return lines(straight)
  end

  it("B90: sft, with its learning rates", function()
    for _, warmup in ipairs({ 0, 2 }) do
      local list = resumes("sft", with(SUMS, {
        ["learning-rate"] = 1e-5, ["warmup-steps"] = warmup, ["lr-scheduler-type"] = "linear",
        ["max-steps"] = 10, ["save-steps"] = 5,
      }), "before: ")
      assert.equal(10, #list)
      for k, line in ipairs(list) do
        local rate = k <= warmup and 1e-5 * (k - 1) / warmup or 1e-5 * (11 - k) / (10 - warmup)
        helper.close(line.learning_rate / 1e-5, rate / 1e-5, 1e-8)
      end
    end
  end)

  it("sft in bf16, whose weights have low bits beside them", function()
    resumes("sft", with(SUMS, { dtype = "bf16", ["lr-scheduler-type"] = "cosine" }), "before: ")
  end)

  it("sft in bf16 whose weights and moments are rounded at random", function()
    resumes("sft", with(SUMS, { dtype = "bf16", optim = "adamw_bf16" }), "before: ")
  end)

  it("sft that has saved its model, the same line again or with more steps", function()
    local model, other, out = folder(), folder(), folder()
    local options = with(SUMS, { save = model, out = out, resume = true })
    local path = model .. "/model.safetensors"
    run("sft", options)
    local saved = helper.read(path)
    run("sft", options)
    assert.is_true(saved == helper.read(path))
    run("sft", with(options, { ["max-steps"] = SUMS["max-steps"] + 1 }))
    assert.is_false(saved == helper.read(path))
    run("sft", with(SUMS, { save = other }))
    options["max-steps"] = SUMS["max-steps"] + 1
    local output, status = start("sft", with(options, { save = other }))
    assert.equal(2, status)
    assert.is_truthy(output:find(other .. " holds a model already", 1, true), output)
  end)

  it("dpo, orpo, kto and cpo on the sums", function()
    local options = with(SUMS, { ["sft-until"] = 0 })
    for _, recipe in ipairs({ "dpo", "orpo", "kto", "cpo" }) do
      resumes(recipe, options, "accuracy before: ")
    end
  end)

  it("dpo on a file, over its epochs", function()
    local model = folder()
    run("sft", with(SUMS, { ["max-steps"] = 1, ["save-steps"] = 0, save = model }))
    local rows = {}
    for i = 1, 8 do
      rows[i] = ('{"prompt": "%d+1=", "chosen": "%d", "rejected": "%d"}'):format(i, i + 1, i + 2)
    end
    local list = resumes("dpo", {
      model = model, data = write("pairs.jsonl", table.concat(rows, "\n")), holdout = 0.25,
      ["num-train-epochs"] = 2, ["batch-size"] = 3, ["save-steps"] = 2, dtype = "bf16",
      ["learning-rate"] = 1e-3, ["precompute-ref-log-probs"] = true,
    }, "answers before: ")
    assert.equal(4, #list)
    assert.equal(2, list[4].epoch)
  end)

  it("distill, on data and on own completions", function()
    local list = resumes("distill", with(SUMS, { ["teacher-until"] = 0, lmbda = 0.5 }), "before: ")
    local own = 0
    for i = #list - 3, #list do
      own = own + list[i].on_policy
    end
    assert.is_true(own > 0 and own < 4)
  end)

  it("grpo, with a reference and several updates a batch", function()
    local short = write("short.lua",
      "return function(_, _, sample) return 1 - #sample.completion / 5 end")
    resumes("grpo", with(GRPO, {
      reward = short, beta = 0.1, ["num-iterations"] = 2, ["sampler-mode"] = "token_truncate",
    }), "accuracy before: ")
  end)
end)

describe("B97: of checkpoints", function()
  local whole

  setup(function()
    whole = run(toy, { ["save-steps"] = 10, ["max-steps"] = 20 })
  end)

  local function uses_10(out, problem)
    local before = helper.list(out .. "/checkpoint-20")
    local output = select(2, run(toy, { resume = out, ["save-steps"] = 0 }))
    assert.equal(
      ("%s/checkpoint-20 is not whole and stays as it is: %s\n"):format(out, problem)
        .. ("resumed from %s/checkpoint-10 (step 10)\n"):format(out),
      output
    )
    assert.same(before, helper.list(out .. "/checkpoint-20"))
    assert.same(lines(whole), lines(out))
  end

  it("the newest is used that has all its files, and the broken one stays", function()
    local out = copy(whole)
    os.remove(out .. "/checkpoint-20/optimizer.safetensors")
    uses_10(out, "optimizer.safetensors is missing")
  end)

  it("one with an empty file is passed over", function()
    local out = copy(whole)
    io.open(out .. "/checkpoint-20/trainer_state.json", "w"):close()
    local bytes = #helper.read(whole .. "/checkpoint-20/trainer_state.json")
    uses_10(out, ("trainer_state.json is 0 bytes, wanted %d"):format(bytes))
  end)

  it("one without its manifest, or with other bytes, is passed over", function()
    local out = copy(whole)
    os.remove(out .. "/checkpoint-20/manifest.json")
    uses_10(out, "manifest.json is missing")
    out = copy(whole)
    local file = io.open(out .. "/checkpoint-20/manifest.json", "w")
    file:write("{}")
    file:close()
    uses_10(out, "manifest.json lists no files")
    file = io.open(out .. "/checkpoint-20/manifest.json", "w")
    file:write("half of i")
    file:close()
    uses_10(out, "manifest.json is no JSON object")
    out = copy(whole)
    file = io.open(out .. "/checkpoint-20/weight.safetensors", "r+b")
    file:seek("end", -1)
    file:write("~")
    file:close()
    uses_10(out, "weight.safetensors has other bytes than were written")
  end)

  it("10 is newer than 9", function()
    local out = run(toy, { ["save-steps"] = 1, ["max-steps"] = 10 })
    for i = 1, 8 do
      os.execute(("rm -r %s/checkpoint-%d"):format(out, i))
    end
    local output = select(2, run(toy, { resume = out }))
    assert.equal(("resumed from %s/checkpoint-10 (step 10)\n"):format(out), output)
  end)

  it("a broken one that is written again keeps its files under another name", function()
    local out = copy(whole)
    for _, names in ipairs({
      { "checkpoint-10", "checkpoint-20", "checkpoint-20.broken" },
      { "checkpoint-10", "checkpoint-20", "checkpoint-20.broken", "checkpoint-20.broken-2" },
    }) do
      os.remove(out .. "/checkpoint-20/optimizer.safetensors")
      run(toy, { resume = out })
      assert.same(names, checkpoints(out))
      same(whole, out, 20)
    end
  end)

  it("a broken one is refused where it is the only one, or was named", function()
    local out = copy(whole)
    os.remove(out .. "/checkpoint-20/optimizer.safetensors")
    local text = out .. "/checkpoint-20 is not whole: optimizer.safetensors is missing"
    refuses({ resume = out .. "/checkpoint-20" }, text)
    os.execute(("rm -r %s/checkpoint-10"):format(out))
    refuses({ resume = out }, text .. ", and no older one is")
    refuses({ resume = true, out = out }, text .. ", and no older one is")
  end)
end)

describe("a checkpoint", function()
  it("that is being written when the process dies leaves the one before", function()
    -- The optimiser's file is twice as large as the model's, and passes the limit.
    local options = {
      ["max-steps"] = 1, ["batch-size"] = 4, ["eval-rows"] = 4, ["save-steps"] = 1,
      ["lr-scheduler-type"] = "constant", ["warmup-steps"] = 0,
    }
    local out = run("sft", options)
    options = with(options, { ["max-steps"] = 2, resume = out })
    local _, status = start("sft", options, "ulimit -f 5000;")
    assert.is_true(status > 128)
    assert.same({ "checkpoint-1", "checkpoint-2.part" }, checkpoints(out))
    local output
    output, status = start("sft", options, "trap '' XFSZ; ulimit -f 5000;")
    assert.equal(1, status)
    assert.matches("%.part/optimizer%.safetensors: cannot be written: File too large\n$", output)
    run("sft", options)
    assert.same({ "checkpoint-1", "checkpoint-2" }, checkpoints(out))
    options.resume = nil
    local straight = run("sft", options)
    same(straight, out, 2)
  end)

  it("is a model that loads, with its tokenizer", function()
    local out = run("sft", { ["max-steps"] = 1, ["batch-size"] = 4, ["eval-rows"] = 4 })
    assert.same({
      "config.json", "generation_config.json", "manifest.json", "model.safetensors",
      "optimizer.safetensors", "tokenizer.json", "trainer_state.json",
    }, helper.list(out .. "/checkpoint-1"))
    local model, tokenizer = require("liger.model").load(out .. "/checkpoint-1")
    assert.equal(426688, model:num_parameters())
    assert.same({ 49, 10 }, tokenizer:encode("1\n"))
  end)

  it("is written each save_steps and at the end, and save_total_limit of them stay", function()
    assert.same({ "checkpoint-3", "checkpoint-6", "checkpoint-8" },
      checkpoints(run(toy, { ["save-steps"] = 3 })))
    assert.same({ "checkpoint-5" }, checkpoints(run(toy, { ["save-steps"] = 100 }, "STOP=5")))
    assert.same({}, checkpoints(run(toy, { ["save-steps"] = 0 })))
    local out = run(toy, { ["save-steps"] = 3, ["save-total-limit"] = 2 })
    assert.same({ "checkpoint-6", "checkpoint-8" }, checkpoints(out))
    -- A broken one neither counts nor goes.
    os.remove(out .. "/checkpoint-6/manifest.json")
    run(toy, { resume = out, ["max-steps"] = 9, ["save-total-limit"] = 1 })
    assert.same({ "checkpoint-6", "checkpoint-9" }, checkpoints(out))
  end)
end)

describe("--resume refuses", function()
  local out

  setup(function()
    write("toy.jsonl", "{}\n")
    out = run(toy, { data = root .. "/toy.jsonl", ["save-steps"] = 4, seed = 3 })
  end)

  it("another value of an option, and names both", function()
    local from = { resume = out }
    refuses(with(from, { lr = 0.25 }), "lr is 0.25, the checkpoint's run had 0.5")
    refuses(with(from, { size = "big" }), "size is big, the checkpoint's run had none")
    refuses(with(from, { seed = 0 }), "seed is 0, the checkpoint's run had 3")
    refuses(with(from, { dtype = "bf16" }), "dtype is bf16, the checkpoint's run had f32")
    refuses(with(from, { ["max-steps"] = 7 }),
      "max_steps is 7, the checkpoint's run had 8: it may only grow")
    run(toy, with(from, { lr = 0.5, seed = 3, threads = 1, ["save-steps"] = 2 }))
  end)

  it("data that has changed", function()
    local from = copy(out, "checkpoint-8")
    write("toy.jsonl", "{} \n")
    refuses({ resume = from }, root .. "/toy.jsonl has changed since the run began")
    write("toy.jsonl", "{}\n")
  end)

  it("a model whose weights have changed", function()
    os.execute(("mkdir %s/model"):format(root))
    local weights = write("model/model.safetensors", "1")
    write("model/other.safetensors", "1")
    local from = run(toy, { data = root .. "/model" })
    write("model/other.safetensors", "2")
    run(toy, { resume = from })
    write("model/model.safetensors", "2")
    refuses({ resume = from }, weights .. " has changed since the run began")
  end)

  it("another recipe, and one with other options", function()
    write("other.lua", TOY)
    refuses({ resume = out }, out .. "/checkpoint-8 is of the recipe toy, this is other",
      root .. "/other.lua")
    os.execute(("mkdir %s/new && mkdir %s/old"):format(root, root))
    write("new/toy.lua", (TOY:gsub("lr = 0.5,", "lr = 0.5, more = 1,")))
    refuses({ resume = out }, "more is an option that the checkpoint's run did not have",
      root .. "/new/toy.lua")
    write("old/toy.lua", (TOY:gsub('data = "",', "")))
    refuses({ resume = out }, "the checkpoint's run had an option data, this recipe has none",
      root .. "/old/toy.lua")
  end)

  it("another device", function()
    local from = copy(out)
    local function change(name, how)
      local path = ("%s/checkpoint-8/%s.json"):format(from, name)
      local value = cjson.decode(helper.read(path))
      how(value)
      local file = io.open(path, "w")
      file:write(cjson.encode(value))
      file:close()
    end
    local device
    change("trainer_state", function(state)
      device, state.device = state.device, "tpu"
    end)
    change("manifest", function(manifest)
      local path = from .. "/checkpoint-8/trainer_state.json"
      manifest.files["trainer_state.json"] = {
        bytes = #helper.read(path), xxh64 = require("liger.file").checksum(path),
      }
    end)
    refuses({ resume = from }, ("the device is %s, the checkpoint's run had tpu"):format(device))
  end)

  it("an older checkpoint in the folder of a newer one", function()
    refuses({ resume = out .. "/checkpoint-4" },
      out .. "/checkpoint-8 is newer, name that or another --out")
  end)

  it("what is no run and no checkpoint", function()
    refuses({ resume = root .. "/gone" }, root .. "/gone: no such folder")
    refuses({ resume = toy }, toy .. ": no such folder")
    os.execute(("mkdir %s/empty"):format(root))
    refuses({ resume = root .. "/empty" }, root .. "/empty has no checkpoint")
    refuses({ resume = true }, "which run? name its folder, or --out")
    local output, status = start(toy, { resume = out, out = root })
    assert.equal(0, status, output) -- the folder is there, and holds no run
  end)
end)

describe("run:keep", function()
  local function raises(things, wanted)
    local path = write("keeps.lua", ([[
local liger = require("liger")
local run = liger.run(liger.config({ max_steps = 1 }))
run:keep(%s)
for _ in run:steps() do
end
]]):format(things))
    local output, status = start(path, { out = folder() })
    assert.equal(1, status)
    assert.matches("keeps%.lua:3: keep: ", output)
    assert.is_truthy(output:find(wanted, 1, true), output)
  end

  it("refuses what it could not put back", function()
    raises("{ a = { f = print } }",
      "a.f is a function, wanted a number, a text, a boolean or a table")
    raises("{ a = 1 }", "a is a number, wanted a table")
    raises("{ a = { [3] = 1 } }", "a has the key 3, wanted names or a list")
    raises("{ a = { 1, b = 2 } }", "a has the key b, wanted names or a list")
    raises("{ a = setmetatable({}, {}) }",
      "a has no state() and set_state(), wanted both or a plain table")
    raises("{ model = {} }", "model has no named_weights(), wanted a model")
  end)

  it("puts back numbers that JSON lacks, at any depth", function()
    local path = write("lacks.lua", [[
local liger = require("liger")
local config = liger.config({ max_steps = 1 })
local run = liger.run(config)
local inf, nan = math.huge, 0 / 0
local kept = config.resume and { list = {}, deep = {} }
  or { list = { inf, -inf }, deep = { least = inf, none = nan, text = "inf" } }
run:keep({ kept = kept })
local deep = kept.deep
print(kept.list[1] == inf, kept.list[2] == -inf, deep.least == inf, deep.none ~= deep.none,
  deep.text == "inf")
for _ in run:steps(1) do
end
run:finish()
]])
    local output, status = start(path, { resume = run(path, {}) })
    assert.equal(0, status, output)
    assert.matches("true\ttrue\ttrue\ttrue\ttrue", output)
  end)

  it("refuses a checkpoint of other things", function()
    local path = write("things.lua", [[
local liger = require("liger")
local config = liger.config({ max_steps = 1 })
local run = liger.run(config)
local kept = { [os.getenv("THING") or "a"] = {}, rows = liger.sampler.new(
  os.getenv("FEWER") and { 1 } or { 1, 2 }, 0
) }
if os.getenv("MORE") then
  kept.more = {}
end
run:keep(kept)
for _ in run:steps(1) do
end
run:finish()
]])
    local out = run(path, {})
    local function refused(before, wanted)
      local output, status = start(path, { resume = out }, before)
      assert.equal(1, status)
      assert.is_truthy(output:find(wanted:format(out .. "/checkpoint-1"), 1, true), output)
    end
    refused("THING=b", "keep: %s has a, which the recipe does not keep")
    refused("MORE=1", "keep: %s has no more, which the recipe keeps")
    refused("FEWER=1", "data: the rows are 1, wanted 2 as in the checkpoint")
  end)
end)
