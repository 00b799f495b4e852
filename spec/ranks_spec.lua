-- Several processes: what they exchange, that the split of a batch changes nothing, and how they
-- end. Each test starts them by mpirun.
local ffi = require("ffi")
local helper = require("spec.helper")
local recipe = require("spec.recipe")

-- A container's root may start mpirun only so, and need not have a core a process.
for name, value in pairs({
  OMPI_ALLOW_RUN_AS_ROOT = "1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = "1",
  OMPI_MCA_rmaps_base_oversubscribe = "1", OMPI_MCA_hwloc_base_binding_policy = "none",
  OMPI_MCA_btl_vader_single_copy_mechanism = "none", -- containers may forbid it
}) do
  ffi.C.setenv(name, value, 1)
end

local root, count

-- What a command printed, and its exit status.
local function shell(line)
  local pipe = io.popen(("timeout 100 %s 2>&1; echo $?"):format(line))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.-)(%d+)\n$")
  -- Said where the machine is small.
  output = output:gsub("liger: %-%-processes: %d+ processes share %d+ cores?\n", "")
  return output, tonumber(status)
end

local function script(text)
  count = count + 1
  return recipe.write(("script-%d.lua"):format(count), 'local ranks = liger.ranks\n' .. text)
end

-- Runs Lua text as so many processes.
local function start(processes, text, words)
  local line = "build/liger run %s --processes %d %s"
  return shell(line:format(script(text), processes, words or ""))
end

-- The lines that the processes printed, in a known order.
local function lines(processes, text)
  local output, status = start(processes, text)
  assert(status == 0, output)
  local list = {}
  for line in output:gmatch("[^\n]+") do
    list[#list + 1] = line
  end
  table.sort(list)
  return list
end

describe("processes", function()
  setup(function()
    root, count = recipe.open(), 0
  end)
  teardown(recipe.close)

  it("tell numbers, texts and tables to each other", function()
    local all = lines(3, [[
      local rank = ranks.rank
      local list = ranks.gather({ name = ("x"):rep(rank), rank = rank })
      assert(#list == 3 and list[3].name == "xx" and list[2].rank == 1)
      assert(ranks.broadcast(rank + 5) == 5)
      assert(ranks.any(rank == 2) == true and ranks.any(false) == false)
      assert(ranks.sum(rank + 0.5) == 4.5)
      local sum = ranks.sum({ a = 1, deep = { b = rank }, only = rank == 2 and 7 or nil })
      assert(sum.a == 3 and sum.deep.b == 3 and sum.only == 7)
      local own, before = ranks.share({ 1, 2, 3, 4, 5, 6, 7 })
      print(rank, before, table.concat(own, ","), table.concat(ranks.join(own), ","))
      own = ranks.share({ "a" })
      assert(#own == (rank == 2 and 1 or 0) and ranks.join(own)[1] == "a")
      ranks.barrier()
    ]])
    local whole = "1,2,3,4,5,6,7"
    assert.same({
      "0\t0\t1,2\t" .. whole, "1\t2\t3,4\t" .. whole, "2\t4\t5,6,7\t" .. whole,
    }, all)
  end)

  it("add tensors up in their order, to the same bits in each", function()
    lines(3, [[
      local function check(dtype, n, value, wanted)
        local x = liger.tensor({ 0 }, dtype)
        x = require("liger.tensor").empty({ n }, dtype)
        for i = 0, n - 1 do
          x:data()[i] = value(ranks.rank, i)
        end
        ranks.sum(x)
        for i = 0, n - 1 do
          assert(tonumber(x:data()[i]) == wanted(i), dtype .. " " .. i)
        end
        local ffi = require("ffi")
        local bits = ffi.string(x:read(), n * (dtype == "f32" and 4 or 8))
        for _, other in ipairs(ranks.gather(bits)) do
          assert(other == bits)
        end
      end
      for _, n in ipairs({ 0, 1, 2, 3, 5, 1000, 1100001 }) do -- the last takes several pieces
        check("f32", n, function(r, i) return (r + 1) * (i % 1001) end,
          function(i) return 6 * (i % 1001) end)
      end
      -- 1e8 + 1 has no f32, 1e16 + 1 no f64
      local function cancelling(big)
        return function(r) return ({ big, 1, -big })[r + 1] end
      end
      check("f32", 7, cancelling(1e8), function() return 1 end)
      check("f64", 7, cancelling(1e16), function() return 0 end)
      check("i64", 7, cancelling(2 ^ 52), function() return 1 end)
      -- Many at once, across the ends of pieces.
      local list, sizes = {}, { 3, 0, 1048570, 7, 1, 1048576, 5 }
      for k, n in ipairs(sizes) do
        list[k] = require("liger.tensor").empty({ n }, "f32"):fill_(k * (ranks.rank + 1))
      end
      ranks.sum_all({})
      ranks.sum_all(list)
      for k, n in ipairs(sizes) do
        for i = 0, n - 1 do
          assert(list[k]:data()[i] == 6 * k, k .. " " .. i)
        end
      end
    ]])
  end)

  it("take the device and the cores that are theirs", function()
    local code = [[-e '
      local device = require("liger.device")
      print(device.local_size, device.ordinal(), device.share_of(8))']]
    for environment, wanted in pairs({
      ["OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4"] = "4\t3\t2\n",
      ["SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE='2(x3)' CUDA_VISIBLE_DEVICES=7"] = "2\t0\t4\n",
      ["SLURM_LOCALID=3 CUDA_VISIBLE_DEVICES=4,5"] = "1\t1\t8\n",
      ["OMPI_COMM_WORLD_LOCAL_SIZE=9"] = "9\t0\t1\n",
      ["OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_MCA_orte_bound_at_launch=1"] = "2\t0\t8\n",
      ["SLURM_STEP_TASKS_PER_NODE=2 SLURM_CPUS_PER_TASK=8"] = "2\t0\t8\n",
    }) do
      assert.equal(wanted, (shell(("env %s build/liger %s"):format(environment, code))))
    end
  end)

  it("share the cores", function()
    local cores = tonumber(shell("nproc"):match("%d+"))
    local wanted = tostring(math.max(1, math.floor(cores / 2)))
    assert.same({ wanted, wanted }, lines(2, [[
      local lib = require("liger.ffi")
      lib.set_threads(0)
      print(tonumber(lib.C.lg_context_threads(lib.ctx)))
    ]]))
  end)

  it("B99: weigh tokens, not processes", function()
    local text = [[
      -- Cross entropy of two classes at logits 0 and x, the target the first: log(1 + e^x)
      local function token(loss) return math.log(math.exp(loss) - 1) end
      local samples = {
        { ids = { 0 }, completion = { 0, 0, 0 }, x = { token(1), token(1), token(1) } },
        { ids = { 0 }, completion = { 0 }, x = { token(5) } },
      }
      local weight = liger.tensor({ { 0 }, { 1 } }):requires_grad_()
      local optimizer = liger.optim.adamw({ { name = "w", tensor = weight } })
      local targets, loss = 0, 0
      for _, sample in ipairs(samples) do
        targets = targets + #sample.completion
      end
      for _, part in ipairs(liger.pack.split(samples, 0)) do
        local x, target = {}, {}
        for _, sample in ipairs(part) do
          for _, value in ipairs(sample.x) do
            x[#x + 1], target[#target + 1] = { value }, 0
          end
        end
        assert(ranks.size == 1 or #x == (ranks.rank == 0 and 3 or 1))
        local y = fn.linear_cross_entropy(
          liger.tensor(x), weight, liger.tensor(target, "i32"), { scale = 1 / targets }
        )
        y:backward()
        loss = loss + y:item()
      end
      local gradient = ranks.sum(weight.grad.clone(weight.grad)):to_table()
      io.write(("%.6f %.6f %.6f %.6f\n"):format(
        ranks.sum(loss), gradient[1][1], gradient[2][1], (optimizer:step())
      ))
    ]]
    local alone = lines(1, text)
    assert.matches("^2%.000000 ", alone[1])
    assert.same({ alone[1], alone[1] }, lines(2, text))
  end)
end)

describe("a split of the batch over processes", function()
  setup(function()
    root, count = recipe.open(), 0
  end)
  teardown(recipe.close)

  -- The recipe, and then whether all processes hold the same bits of the weights it trained.
  local wrapper = [[
    local ffi, optim = require("ffi"), require("liger.optim")
    local adamw, parameters = optim.adamw
    optim.adamw = function(list, options)
      parameters = list
      return adamw(list, options)
    end
    dofile("recipes/%s.lua")
    local bits = {}
    for i, p in ipairs(parameters) do
      bits[i] = ffi.string(p.tensor:read(), p.tensor:numel() * 4)
    end
    bits = table.concat(bits)
    for _, other in ipairs(ranks.gather(bits)) do
      assert(#bits > 1e6 and other == bits, "the weights differ")
    end
    if ranks.is_main then
      print("same weights in " .. ranks.size)
    end
  ]]

  local function changes_nothing(name, processes, options)
    local alone = recipe.run(name, options)
    local split = recipe.run(script(wrapper:format(name)), recipe.with(options, {
      processes = processes,
    }))
    assert.equal(alone.output .. "same weights in " .. processes .. "\n", split.output)
    assert.equal(#alone.metrics, #split.metrics)
    for i, wanted in ipairs(alone.metrics) do
      local got = split.metrics[i]
      for key, value in pairs(recipe.with(got, wanted)) do
        assert(got[key] and wanted[key], ("line %d has %s once"):format(i, key))
        if type(value) == "number" then
          -- A norm is of a sum of many gradients' rounding; a loss is within 1e-5 as it stands.
          local most = key == "loss" and 1e-5 or 1e-5 * math.max(1, math.abs(value))
          assert(math.abs(got[key] - value) <= most,
            ("%s of line %d is %.9g, alone %.9g"):format(key, i, got[key], value))
        end
      end
    end
    return alone, split
  end

  local few = { max_steps = 2, batch_size = 8, eval_rows = 8 }
  local pairs_of_sums = recipe.with(few, { sft_until = 0 })

  it("changes nothing in sft", function()
    changes_nothing("sft", 2, few)
  end)

  it("changes nothing in sft where some have no row", function()
    changes_nothing("sft", 3, recipe.with(few, { batch_size = 2, label_smoothing = 0.1 }))
  end)

  it("changes nothing in distillation", function()
    changes_nothing("distill", 2, recipe.with(few, { teacher_until = 0, lmbda = 0.5 }))
  end)

  it("changes nothing in dpo, whose reference's numbers come from all", function()
    changes_nothing("dpo", 2, recipe.with(pairs_of_sums, { precompute_ref_log_probs = true }))
  end)

  it("changes nothing in kto, whose KL is the whole batch's", function()
    changes_nothing("kto", 2, pairs_of_sums)
  end)

  it("changes nothing in orpo", function()
    changes_nothing("orpo", 2, pairs_of_sums)
  end)

  local grpo = { max_steps = 2, prompts_per_step = 6, sft_until = 0, eval_rows = 8 }

  it("changes nothing in grpo, whose completions are the same", function()
    local alone, split = changes_nothing("grpo", 2, grpo)
    assert.equal(
      helper.read(alone.folder .. "/samples.jsonl"), helper.read(split.folder .. "/samples.jsonl")
    )
  end)

  it("changes nothing in grpo with what needs the whole batch", function()
    changes_nothing("grpo", 2, recipe.with(grpo, {
      sampler_mode = "token_truncate", beta = 0.1, top_entropy_quantile = 0.5,
      entropy_coef = 0.01, scale_rewards = "batch", num_iterations = 2,
    }))
  end)

  it("is refused by aot, which sorts it", function()
    local output, status = recipe.start("dpo", { loss_type = "aot", processes = 2 })
    assert.equal(1, status)
    assert.matches("dpo: aot sorts the whole batch, wanted 1 process, got 2\n", output)
  end)

  it("keeps the meaning of per_device_train_batch_size", function()
    local run = recipe.run("sft", {
      per_device_train_batch_size = 4, processes = 2, max_steps = 1, eval_rows = 1,
    })
    assert.matches('"batch_size":8[,}]', helper.read(run.folder .. "/config.json"))
  end)
end)

describe("a run of several processes", function()
  setup(function()
    root, count = recipe.open(), 0
  end)
  teardown(recipe.close)

  it("goes on from its checkpoint with the same bits, and no other number does", function()
    local options = {
      max_steps = 2, prompts_per_step = 4, sft_until = 0, eval_rows = 4, processes = 2,
      save_steps = 1,
    }
    local straight = recipe.run("grpo", options)
    local folder = root .. "/resumed"
    local output, status = recipe.start("grpo", {
      resume = straight.folder .. "/checkpoint-1", out = folder, processes = 2, save_steps = 1,
    })
    assert.equal(0, status, output)
    assert.matches("resumed from .*/checkpoint%-1 %(step 1%)", output)
    local function lines_of(run, name)
      local list = recipe.lines_of(run .. "/" .. name)
      for _, line in ipairs(list) do
        line.step_time, line.tokens_per_second = nil, nil
      end
      return list
    end
    for _, name in ipairs({ "metrics.jsonl", "samples.jsonl" }) do
      assert.same(lines_of(straight.folder, name), lines_of(folder, name))
    end
    for _, name in ipairs({ "model.safetensors", "optimizer.safetensors" }) do
      local path = "/checkpoint-2/" .. name
      assert(helper.read(straight.folder .. path) == helper.read(folder .. path), name)
    end
    output, status = recipe.start("grpo", { resume = straight.folder, out = root .. "/alone" })
    assert.equal(2, status)
    assert.equal("liger: --resume: processes is 1, the checkpoint's run had 2\n", output)
  end)
end)

describe("processes that fail", function()
  setup(function()
    root, count = recipe.open(), 0
  end)
  teardown(recipe.close)

  it("end the others, and one line says which it was", function()
    local output, status = start(2, [[
      if ranks.rank == 1 then
        error("no luck", 0)
      end
      ranks.barrier()
    ]])
    assert.equal("liger: process 1: no luck\n", output)
    assert.equal(1, status)
  end)

  it("all at the same say it once", function()
    local output, status = start(2, [[
      ranks.barrier()
      error("no luck", 0)
    ]])
    assert.equal("liger: no luck\n", output)
    assert.equal(1, status)
    output, status = shell("build/liger run recipes/sft.lua --processes 2 --lr 3")
    assert.equal("liger: --lr: unknown option, did you mean --learning_rate?\n", output)
    assert.equal(2, status)
  end)

  it("for doing different things do not wait for each other", function()
    local printed = lines(2, [[
      local function try(...) print(select(2, pcall(...))) end
      local x = liger.zeros(5)
      try(ranks.rank == 1 and ranks.sum or ranks.gather, x:numel() == 5 and ranks.rank == 1 and x)
      try(ranks.sum, liger.zeros(4 + ranks.rank))
      ranks.barrier()
    ]])
    assert.equal(4, #printed)
    for _, line in ipairs(printed) do
      assert.matches("ranks: process 1 is at a sum of 5, wanted a gather of %d+ as in process 0: "
        .. "all must do the same$", (line:gsub("a sum of 4", "a gather of 4")))
    end
  end)

  it("are those that sum what has no sum", function()
    local printed = table.concat(lines(2, [[
      local function try(...) print(select(2, pcall(...))) end
      try(ranks.sum, liger.tensor({ 1 }, "i32"))
      try(ranks.sum, liger.zeros(4, 4):narrow(2, 1, 2))
      try(ranks.sum_all, { liger.zeros(1), liger.tensor({ 1 }, "f64") })
    ]]), "\n")
    assert.matches("ranks: sum is of i32, wanted f32, f64 or i64\n", printed)
    assert.matches("ranks: sum is of a strided tensor, wanted a dense one\n", printed)
    assert.matches("ranks: sum is of f32 and f64, wanted one dtype\n", printed)
  end)

  it("are those that all take the whole batch", function()
    local printed = lines(2, [[
      local weight = liger.ones(2, 2):requires_grad_()
      local optimizer = liger.optim.adamw({ { name = "w", tensor = weight } })
      fn.sum(weight):backward()
      print(pcall(optimizer.step, optimizer))
    ]])
    assert.matches("ranks: no batch was shared among 2 processes, wanted pack.split or ranks.share",
      printed[1])
  end)

  it("are those whose weights differ", function()
    local printed = lines(2, [[
      local function optimizer(seed)
        liger.manual_seed(seed)
        return liger.optim.adamw({
          { name = "a", tensor = liger.ones(3) }, { name = "b", tensor = liger.randn(3) },
        })
      end
      print(optimizer(1) ~= nil, select(2, pcall(optimizer, ranks.rank)))
    ]])
    for rank = 1, 2 do
      assert.matches("^true\t.*ranks: b is not the same in processes 0 and 1$", printed[rank])
    end
  end)

  it("are those started in another number than asked for", function()
    local words = "recipes/sft.lua --processes 3"
    local output = shell("mpirun --quiet -n 2 build/liger run " .. words)
    assert.matches("liger: %-%-processes: got 3, wanted 2 as were started\n", output)
    assert.matches('%-%-processes: got "0", wanted a whole number from 1',
      (shell("build/liger run recipes/sft.lua --processes 0")))
  end)

  it("are those of another MPI's launcher", function()
    assert.matches("ranks: MPI says process 0 of 1, wanted 0 of 2 as started",
      (shell("env PMI_SIZE=2 PMI_RANK=0 build/liger run " .. script("ranks.barrier()"))))
  end)

  it("without Open MPI say so", function()
    assert.matches("^liger: %-%-processes: mpirun: No such file or directory; Debian has it in ",
      (shell("env PATH=/nowhere build/liger run recipes/sft.lua --processes 2")))
    local line = "env PMI_SIZE=2 LD_LIBRARY_PATH=%s build/liger run " .. script("ranks.barrier()")
    local library = recipe.write("libmpi.so.40", "")
    assert.matches("ranks: cannot open Open MPI: .*; Debian's is libopenmpi3\n",
      (shell(line:format(root))))
    assert.equal(0, os.execute(("echo | cc -shared -x c - -o %s"):format(library)))
    assert.matches("ranks: libmpi.so.40 has no MPI_Init_thread, wanted Open MPI's",
      (shell(line:format(root))))
  end)
end)

describe("Ctrl-C", function()
  setup(function()
    root, count = recipe.open(), 0
  end)
  teardown(recipe.close)

  it("says when there are more processes than cores", function()
    local status = assert(io.open("/proc/self/status")):read("*a")
    local core = status:match("Cpus_allowed_list:%s*(%d+)")
    local line = "taskset -c %s build/liger run %s --processes 2 %s 2>&1"
    for words, wanted in pairs({
      [""] = "liger: --processes: 2 processes share 1 core\n", ["--quiet"] = "",
    }) do
      local pipe = io.popen(line:format(core, script("ranks.barrier()"), words))
      assert.equal(wanted, pipe:read("*a"))
      pipe:close()
    end
  end)

  it("ends all processes after the same step", function()
    local text = [[
      local run = liger.run(liger.config({}))
      local last = 0
      for step in run:steps(1000000) do
        run:log({ loss = 1 })
        last = step
        if step == 5 and ranks.is_main then
          io.popen("kill -USR1 $PPID"):close()
        end
      end
      run:finish()
      assert(ranks.sum(last) == 2 * last)
      run:print("all at one step")
    ]]
    local output, status = start(2, text, "--quiet --out " .. root .. "/interrupted")
    assert.equal(130, status)
    assert.matches("interrupted after step %d+\nall at one step\n", output)
  end)

  it("is passed on by the program that starts them, and ends them at once when it comes again",
    function()
      local path = script([[
        local run = liger.run(liger.config({}))
        if ranks.is_main then
          print("ready")
          io.stdout:flush()
        end
        for step in run:steps(1e9) do
          run:log({ loss = 1 })
        end
      ]])
      local line = ([[sh -c '
        build/liger run %s --processes 2 --quiet --out %s/out-$1 >%s/printed & p=$!
        until grep -q ready %s/printed; do sleep 0.05; done
        kill -INT $p
        [ $1 = once ] || { sleep 0.01; kill -INT $p; }
        wait $p; echo status $?' sh ]]):format(path, root, root, root)
      local output = shell(line .. "once")
      assert.matches("status 130\n", output)
      assert.matches("interrupted after step", helper.read(root .. "/printed"))
      assert.matches("status 130\n", (shell("rm " .. root .. "/printed; " .. line .. "again")))
    end)
end)
