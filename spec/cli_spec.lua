local helper = require("spec.helper")
local cjson = require("cjson")
local model_module = require("liger.model")
local tokenizer_module = require("liger.data.tokenizer")
local weights = require("liger.model.weights")

local root

local function quoted(word)
  return "'" .. word:gsub("'", "'\\''") .. "'"
end

-- Runs the program in the folder of this spec; its output (stderr too) and exit status.
local function liger_reading(input, ...)
  local words = {}
  for i, word in ipairs({ ... }) do
    words[i] = quoted(word)
  end
  local program = quoted(os.getenv("PWD") .. "/build/liger")
  local line = ("cd %s && %s %s 2>&1 <%s; echo $?"):format(
    quoted(root),
    program,
    table.concat(words, " "),
    quoted(input)
  )
  local pipe = io.popen(line)
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.-)(%d+)\n$")
  return output, tonumber(status)
end

local function liger(...)
  return liger_reading("/dev/null", ...)
end

local function write(name, text)
  local file = assert(io.open(root .. "/" .. name, "wb"))
  file:write(text)
  file:close()
end

local function prints(wanted, ...)
  local output, status = liger(...)
  assert.are.equal(wanted, output)
  assert.are.equal(0, status)
end

local function fails(status, message, ...)
  local output, got = liger(...)
  assert.are.equal("liger: " .. message .. "\n", output)
  assert.are.equal(status, got)
end

local recipe = [[
-- Counts.
local liger = require("liger")
local config = liger.config({
  steps = 3, -- how many
  lr = 0.5, -- learning rate
  at = 0, -- step at which it happens
  what = "", -- what happens
}, { lr = { above = 0 } })
print("lr", config.lr)
local run = liger.run(config)
for step in run:steps() do
  local loss = 1 / step
  if step == config.at then
    if config.what == "nan" then
      loss = 0 / 0
    elseif config.what == "error" then
      error("no luck")
    elseif config.what == "interrupt" then
      io.popen("kill -INT $PPID"):close()
    end
  end
  run:log { loss = loss }
end
]]

describe("liger", function()
  -- A random model in a folder of that name.
  local function make_model(name, vocab)
    os.execute("mkdir -p " .. quoted(root .. "/" .. name))
    local config = {
      architectures = { "LlamaForCausalLM" },
      model_type = "llama",
      vocab_size = vocab,
      hidden_size = 8,
      intermediate_size = 16,
      num_hidden_layers = 2,
      num_attention_heads = 2,
      num_key_value_heads = 1,
      max_position_embeddings = 64,
      rms_norm_eps = 1e-6,
      tie_word_embeddings = true,
    }
    write(name .. "/config.json", cjson.encode(config))
    local model = model_module.from_config(config):init(1, 0.5)
    weights.save(model, ("%s/%s/model.safetensors"):format(root, name))
  end

  setup(function()
    root = os.tmpname()
    os.remove(root)
    make_model("model", 20)
    make_model("bytes", 256) -- with a tokenizer whose ids are bytes
    tokenizer_module.bytes():save(root .. "/bytes")
    write("recipe.lua", recipe)
  end)

  teardown(function()
    os.execute("rm -rf " .. quoted(root))
  end)

  describe("run", function()
    it("runs a recipe with its options and prints its steps", function()
      local output, status = liger("run", "recipe.lua", "--lr", "1e-4", "--out", "first")
      assert.are.equal(0, status)
      assert.is_truthy(output:match("^lr\t0%.0001\nstep 1/3  loss 1  %d+ MiB  0:00 left\n"))
      assert.is_truthy(output:match("\nstep 3/3  loss 0%.3333  %d+ MiB\nfirst  0:00\n$"))
      local stored = cjson.decode(helper.read(root .. "/first/config.json"))
      assert.are.equal("liger run recipe.lua --lr 1e-4 --out first", stored.command)
      assert.are.equal("recipe.lua", stored.recipe)
      assert.are.equal("liger " .. stored.version .. "\n", (liger("--version")))
    end)

    it("shows nothing but what a recipe prints with --quiet", function()
      prints("lr\t0.5\n", "recipe.lua", "--quiet")
    end)

    it("names the folder by recipe and time", function()
      os.execute("rm -rf " .. quoted(root .. "/runs"))
      liger("run", "recipe")
      local names = helper.list(root .. "/runs")
      assert.are.equal(1, #names)
      assert.is_truthy(names[1]:match("^recipe%-%d%d%d%d%d%d%d%d%-%d%d%d%d%d%d$"))
    end)

    it("prints the recipe's help", function()
      prints(
        ([[
usage: liger run recipe.lua [--key value ...]

Counts.

options, their defaults:
  --steps  3    how many
  --lr     0.5  learning rate
  --at     0    step at which it happens
  --what   ""   what happens

in every recipe:
  --out               runs/recipe-TIME  folder of the run
  --save_steps        500               steps between checkpoints; one more at the end; 0: at Ctrl-C
  --save_total_limit  0                 newest checkpoints that stay; 0: all
  --resume            none              path or none: %s
  --seed              0                 seed of all random numbers
  --threads           0                 CPU threads of a process; 0: all cores
  --dtype             f32               of the weights: f32 or bf16
  --device            auto              auto (a GPU when there is one), cpu or cuda:N
  --processes         1                 processes of this machine that share each batch, a GPU each
  --quiet             false             no progress
]]):format(
          "a run or a checkpoint to go on from; alone: --out. "
            .. "max_steps may grow: rates are then the longer run's"
        ),
        "run",
        "recipe.lua",
        "--help"
      )
    end)

    it("takes common options in front", function()
      write("seed.lua", 'local c = require("liger").config {} print(c.seed, c.threads, c.dtype)')
      prints("3\t2\tbf16\n", "--seed", "3", "--threads=2", "run", "seed.lua", "--dtype", "bf16")
      prints("4\t0\tf32\n", "--seed", "4", "seed.lua")
    end)

    it("B104: wrong options end with status 2 before any work", function()
      fails(2, "--learning_rate: unknown option, did you mean --lr?", "run", "recipe.lua",
        "--learning_rate", "1", "--out", "wrong")
      fails(2, '--lr: got "-1", wanted a number above 0', "run", "recipe.lua", "--lr", "-1",
        "--out", "wrong")
      fails(2, "--what-: unknown option, did you mean --what?", "recipe.lua", "--what-", "1",
        "--out", "wrong")
      assert.is_false(helper.exists(root .. "/wrong/config.json"))
    end)

    it("stops at NaN with one line", function()
      local output, status = liger("recipe.lua", "--at", "2", "--what", "nan", "--out", "nan")
      assert.are.equal(1, status)
      assert.is_truthy(output:find("\nliger: step 2: loss is nan\n$"))
      local text = helper.read(root .. "/nan/metrics.jsonl")
      assert.is_truthy(text:match('"loss":"nan"[^\n]*}\n$'))
    end)

    it("keeps whole lines when a recipe raises, and shows where with --traceback", function()
      local args = { "recipe.lua", "--at", "3", "--what", "error", "--out" }
      args[7] = "raised"
      local output, status = liger(unpack(args))
      assert.are.equal(1, status)
      assert.is_truthy(output:find("\nliger: recipe.lua:17: no luck\n$"))
      local text = helper.read(root .. "/raised/metrics.jsonl")
      assert.are.equal(2, select(2, text:gsub("\n", "")))
      assert.is_truthy(text:match("}\n$"))
      args[7] = "raised again"
      output = liger("--traceback", unpack(args))
      assert.is_truthy(output:find("recipe.lua:17: no luck\n\nstack traceback:\n", 1, true))
      assert.is_truthy(output:find("recipe.lua:17: in main chunk", 1, true))
    end)

    it("ends with status 130 after Ctrl-C", function()
      local args = { "recipe.lua", "--at", "2", "--what", "interrupt", "--out", "int" }
      local output, status = liger(unpack(args))
      assert.are.equal(130, status)
      assert.is_truthy(output:find("step 2/3  loss 0.5", 1, true))
      assert.is_truthy(output:find("\ninterrupted after step 2\nint  0:00\n$"))
    end)

    it("gives a plain script its words, `liger` and `fn`", function()
      write("plain.lua", "print(arg[0], arg[1], ...) print(fn == liger.fn, liger.fn == fn)")
      prints("plain.lua\t-x\t-x\ty\ntrue\ttrue\n", "plain.lua", "-x", "y")
    end)

    it("starts an empty script at once", function()
      write("empty.lua", "")
      local clock = require("liger.ffi").C.lg_sys_time
      local best = math.huge
      for _ = 1, 5 do
        local start = clock()
        prints("", "empty.lua")
        best = math.min(best, clock() - start)
      end
      assert.is_true(best < 0.05, ("%.3f s"):format(best))
    end)

    it("says what is wrong with the file", function()
      fails(1, "gone.lua: no such file", "run", "gone.lua")
      fails(1, "gone.lua: no such file", "gone.lua")
      fails(2, "run: no file; `liger run --help`", "run")
      fails(2, "run: the file comes first, got --lr; `liger run --help`", "run", "--lr", "1")
      write("broken.lua", "local x = = 3")
      fails(1, "broken.lua:1: unexpected symbol near '='", "broken.lua")
    end)
  end)

  describe("-e", function()
    it("runs a line with liger's names", function()
      prints("6\n", "-e", "print(fn.sum(tensor { 1, 2, 3 }):item())")
    end)

    it("takes options in front", function()
      local first = liger("--seed", "1", "-e", "print(randn(2))")
      assert.are_not.equal(first, (liger("--seed", "2", "-e", "print(randn(2))")))
      assert.are.equal(first, (liger("--seed=1", "-e", "print(randn(2))")))
      assert.are.equal(first, (liger("-e", "print(randn(2))", "--seed", "1")))
    end)

    it("says what is wrong", function()
      fails(2, "-e: no value, wanted Lua code", "-e")
      fails(1, "-e:1: unexpected symbol near '='", "-e", "= 3")
      fails(1, "-e:1: no", "-e", 'error("no")')
      local message = '--seed: got "x", wanted a whole number from 0'
      fails(2, message, "--seed", "x", "-e", "")
      fails(2, "more: unexpected word; options are --key value", "-e", "x = 1", "more")
      message = "--dtype: no model here, use load(path, { dtype = NAME })"
      fails(2, message, "--dtype", "bf16", "-e", "")
      fails(2, message, "--dtype=bf16")
    end)
  end)

  it("alone is the prompt", function()
    prints("", "--seed", "1")
  end)

  it("prints help for itself and for each command", function()
    local output = liger("--help")
    assert.are.equal(output, (liger("help")))
    assert.are.equal(output, (liger("-h")))
    for _, name in ipairs({ "run", "generate", "score", "info" }) do
      assert.is_truthy(output:find("liger " .. name, 1, true))
      local text, status = liger("help", name)
      assert.are.equal(0, status)
      assert.is_truthy(text:find("usage: liger " .. name, 1, true))
      assert.are.equal(text, (liger(name, "--help")))
    end
    assert.is_truthy(output:find("LIGER_DEVICE") and output:find("LIGER_TRACEBACK"))
    fails(2, "more: unexpected word after run", "help", "run", "more")
    fails(2, "more: unexpected word after --version", "--version", "more")
    fails(2, "help: no command scores, did you mean score?", "help", "scores")
  end)

  it("names the nearest of a wrong command", function()
    fails(2, "no command generat, did you mean generate?", "generat", "x")
    fails(2, "--wrong: unknown option; `liger --help`", "--wrong")
  end)

  describe("score", function()
    it("prints log-probability and entropy from the second id on", function()
      local output, status = liger("score", "model", "--ids", "1,2,3", "--json")
      assert.are.equal(0, status)
      local scored = cjson.decode(output)
      assert.are.same({ 1, 2, 3 }, scored.ids)
      local model = model_module.load(root .. "/model")
      local logits = model:logits({ 1, 2, 3 }):to_table()
      for i = 1, 2 do
        local sum, entropy = 0, 0
        for _, z in ipairs(logits[i]) do
          sum = sum + math.exp(z)
        end
        for _, z in ipairs(logits[i]) do
          entropy = entropy - math.exp(z) / sum * (z - math.log(sum))
        end
        helper.close(scored.logp[i], logits[i][i + 2] - math.log(sum), 1e-5)
        helper.close(scored.entropy[i], entropy, 1e-5)
      end
      assert.are.equal(2, #scored.logp)
    end)

    it("prints a table with the mean and the perplexity", function()
      local scored = cjson.decode((liger("score", "model", "--ids", "1,2,3", "--json")))
      local mean = (scored.logp[1] + scored.logp[2]) / 2
      local output = liger("score", "model", "--ids", "1,2,3")
      local row = ("      2         %9.4f  %8.4f\n"):format(scored.logp[1], scored.entropy[1])
      local head = "     id  token       logp   entropy\n      1\n"
      assert.are.equal(head .. row, output:sub(1, #head + #row))
      local last = ("mean logp %.4f  perplexity %.5g  tokens 2\n"):format(mean, math.exp(-mean))
      assert.are.equal(last, output:sub(-#last))
    end)

    it("encodes a text and shows its tokens", function()
      local by_ids = liger("score", "bytes", "--ids", "72,105,33", "--json")
      assert.are.equal(by_ids, (liger("score", "bytes", "Hi!", "--json")))
      write("text", "Hi!\n")
      assert.are.equal(by_ids, (liger_reading("text", "score", "bytes", "-", "--json")))
      local output = liger("score", "bytes", "a\n\"")
      assert.is_truthy(output:find('\n     97  "a"\n     10  "\\n"   ', 1, true))
      assert.is_truthy(output:find('\n     34  "\\""  ', 1, true))
    end)

    it("says what is wrong", function()
      fails(2, "score: no MODEL; `liger score --help`", "score")
      fails(2, "score: no TEXT; `liger score --help`", "score", "model")
      fails(1, "model: no tokenizer.json, use --ids", "score", "model", "hello")
      local both = "score: TEXT beside --ids, wanted one of them"
      fails(2, both, "score", "model", "hello", "--ids", "1,2")
      fails(1, "score: 1 token, wanted at least two", "score", "model", "--ids", "1")
      local message = '--ids: got "1,x", wanted whole numbers like 1,2,3'
      fails(2, message, "score", "model", "--ids", "1,x")
      message = "--ids: 20 is outside of the vocabulary of 20"
      fails(2, message, "score", "model", "--ids", "20,1")
      fails(2, "--jsn: unknown option, did you mean --json?", "score", "model", "--jsn")
      fails(2, "c: unexpected word; options are --key value", "score", "a", "b", "c")
      fails(
        1,
        "gone: no such file or folder, wanted a folder with config.json or a GGUF file",
        "score",
        "gone",
        "x"
      )
    end)
  end)

  describe("generate", function()
    local function generate(...)
      local output, status = liger("generate", "model", "--ids", "1,2,3", ...)
      assert.are.equal(0, status)
      return output
    end

    it("prints ids, their log-probabilities and the text as one object", function()
      local result = cjson.decode(generate("--json", "--greedy", "--max-new", "5"))
      assert.are.equal(5, #result.ids)
      assert.are.equal("", result.text)
      local ids = table.concat(result.ids, ",")
      local scored = cjson.decode((liger("score", "model", "--json", "--ids", "1,2,3," .. ids)))
      for i = 1, 5 do
        helper.close(result.logp[i], scored.logp[i + 2], 1e-6)
      end
    end)

    it("draws by the seed", function()
      local first = generate("--max-new", "20", "--seed", "1")
      assert.are.equal(first, generate("--max_new", "20", "--seed", "1"))
      assert.are_not.equal(first, generate("--max-new", "20", "--seed", "2"))
      assert.are.equal(generate("--greedy"), generate("--temperature", "0"))
      assert.are.equal(generate("--greedy"), generate("--top-k", "1"))
    end)

    it("stays in the context where --max-new was not given", function()
      local result = cjson.decode(generate("--json"))
      assert.are.equal(61, #result.ids)
    end)

    it("prints the text, whole characters as they come", function()
      local args = { "generate", "bytes", "Hi", "--max-new", "40", "--seed", "3" }
      local text, status = liger(unpack(args))
      assert.are.equal(0, status)
      args[#args + 1] = "--json"
      local result = cjson.decode((liger(unpack(args))))
      assert.are.equal(40, #result.ids)
      assert.are.equal(result.text .. "\n", text)
      write("text", "Hi\n")
      args[3] = "-"
      assert.are.same(result, cjson.decode((liger_reading("text", unpack(args)))))
    end)

    it("answers by the chat template", function()
      local message = "bytes: no chat template, wanted a prompt without --chat"
      fails(1, message, "generate", "bytes", "Hi", "--chat")
      write(
        "bytes/chat_template.jinja",
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
          .. "{% if add_generation_prompt %}>{% endif %}"
      )
      local options = { "--json", "--max-new", "10" }
      local plain = liger("generate", "bytes", "user:Hi;>", unpack(options))
      assert.are.equal(plain, (liger("generate", "bytes", "--chat", "Hi", unpack(options))))
      plain = liger("generate", "bytes", "system:be;user:Hi;>", unpack(options))
      local args = { "generate", "bytes", "Hi", "--chat", "--system", "be", unpack(options) }
      assert.are.equal(plain, (liger(unpack(args))))
      os.remove(root .. "/bytes/chat_template.jinja")
    end)

    it("says what is wrong", function()
      fails(1, "generate: the prompt is empty", "generate", "bytes", "")
      local function beside(name, other, ...)
        local message = ("generate: %s beside %s, wanted one of them"):format(name, other)
        fails(2, message, "generate", "bytes", ...)
      end
      beside("PROMPT", "--ids", "Hi", "--ids", "1")
      beside("--chat", "--ids", "--ids", "1", "--chat")
      beside("--system", "--ids", "--ids", "1", "--system", "be")
      beside("--temperature", "--greedy", "Hi", "--greedy", "--temperature", "0.5")
      beside("--top-k", "--greedy", "Hi", "--greedy", "--top-k", "5")
      beside("--top-p", "--greedy", "Hi", "--greedy", "--top-p", "0.5")
      beside("--min-p", "--temperature 0", "Hi", "--temperature", "0", "--min-p", "0.5")
      fails(2, "generate: --system without --chat, wanted both", "generate", "bytes", "Hi",
        "--system", "be")
      fails(1, "model: no tokenizer.json, use --ids", "generate", "model", "hello")
      fails(2, "generate: no PROMPT; `liger generate --help`", "generate", "model")
      fails(
        2,
        '--top-p: got "2", wanted a number from 0 to 1',
        "generate",
        "model",
        "x",
        "--top-p",
        "2"
      )
      -- The default is given too.
      for _, max_new in ipairs({ "62", "128" }) do
        local form = "generate: prompt 1 has 3 tokens and max_new is %s, wanted at most 64 together"
        fails(1, form:format(max_new), "generate", "model", "--ids", "1,2,3", "--max-new", max_new)
      end
      beside("--temperature", "--greedy", "Hi", "--greedy", "--temperature", "1")
      beside("--top-p", "--temperature 0", "Hi", "--temperature", "0", "--top-p", "1")
    end)
  end)

  describe("info", function()
    it("describes a folder without reading its weights", function()
      prints(
        [[
architecture   LlamaForCausalLM
parameters     1,352
dtype          F32
layers         2
hidden size    8
heads          2, 1 for keys and values
vocabulary     20
context        64
tokenizer      none
chat template  no
size on disk   0.0 MiB
]],
        "info",
        "model"
      )
      local facts = cjson.decode((liger("info", "model", "--json")))
      assert.are.equal(1352, facts.parameters)
      assert.are.equal(2, facts.layers)
      assert.is_false(facts.chat_template)
    end)

    it("knows the tokenizer and the chat template", function()
      write("bytes/chat_template.jinja", "x")
      local facts = cjson.decode((liger("info", "bytes", "--json")))
      assert.are.equal("BPE", facts.tokenizer)
      assert.is_true(facts.chat_template)
      os.remove(root .. "/bytes/chat_template.jinja")
    end)

    it("says what is wrong", function()
      fails(1, "gone: no such file and no folder with config.json", "info", "gone")
      fails(
        1,
        "model/model.safetensors: weights without a config, wanted a folder or a GGUF file",
        "info",
        "model/model.safetensors"
      )
      os.execute("mkdir -p " .. quoted(root .. "/bad"))
      write("bad/config.json", "[")
      local output, status = liger("info", "bad")
      assert.are.equal(1, status)
      assert.is_truthy(output:find("^liger: bad/config.json: no JSON object: "))
    end)
  end)

  -- A real model, where there is one.
  local smollm2 = os.getenv("LIGER_SMOLLM2")
  local golden = helper.golden_folder("smollm2") .. "/golden.json"
  if smollm2 and smollm2 ~= "" and helper.exists(golden) then
    it("scores and continues as transformers does", function()
      local prompt = cjson.decode(helper.read(golden)).prompts[1]
      local scored = cjson.decode((liger("score", smollm2, prompt.text, "--json")))
      assert.are.same(prompt.ids, scored.ids)
      for i = 1, #prompt.ids - 1 do
        helper.close(scored.logp[i], prompt.next_logp[i], 1e-4)
        helper.close(scored.entropy[i], prompt.entropy[i], 1e-4)
      end
      local n = tostring(#prompt.greedy_ids)
      local args = { "generate", smollm2, prompt.text, "--greedy", "--max-new", n }
      assert.are.equal(prompt.greedy_text .. "\n", (liger(unpack(args))))
      assert.is_truthy((liger("info", smollm2)):find("parameters     134,515,008\n", 1, true))
    end)
  end
end)
