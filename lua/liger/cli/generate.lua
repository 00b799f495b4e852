-- liger generate: text from a model, shown as it comes.
local model_cli = require("liger.cli.model")
local options = require("liger.train.options")

local M = {}

M.help = [[
usage: liger generate MODEL PROMPT [options]

Continues a text, or answers it with --chat. MODEL is a Hugging Face folder or a GGUF file; a PROMPT
of - is read from standard input.

  liger generate models/SmolLM2-135M "The capital of France is" --greedy
  liger generate models/Qwen3-0.6B --chat "Why is the sky blue?" --temperature 0.6 --top-p 0.95
  liger generate models/SmolLM2-135M - --json < prompt.txt
]]

local whole, positive = { min = 0, whole = true }, { min = 1, whole = true }
local share = { min = 0, max = 1 }

local command = {
  name = "generate",
  help = M.help,
  words = { "MODEL", "PROMPT" },
  keys = {
    {
      name = "max-new", default = 128, comment = "tokens at most; fewer where the context ends",
      allow = positive,
    },
    { name = "greedy", default = false, comment = "take the most likely token" },
    { name = "temperature", default = 1, comment = "0: greedy", allow = { min = 0 } },
    { name = "top-k", default = 0, comment = "draw from the k likeliest; 0: all", allow = whole },
    { name = "top-p", default = 1, comment = "draw from this much probability", allow = share },
    { name = "min-p", default = 0, comment = "least share of the likeliest one's", allow = share },
    { name = "chat", default = false, comment = "the prompt is a user's message" },
    { name = "system", default = "", comment = "a system message for --chat" },
    { name = "ids", default = "", comment = "the prompt as ids, like 1,2,3" },
    { name = "json", default = false, comment = "print ids, logp and text as one object" },
  },
}

-- Refuses options that would have no effect.
local function check_options(values, given)
  local function beside(names, other)
    for _, name in ipairs(names) do
      if given[name] and values[name] then
        model_cli.refuse_both(command, "--" .. name, other)
      end
    end
  end
  if values.ids ~= "" then
    beside({ "chat", "system" }, "--ids")
  elseif values.system ~= "" and not values.chat then
    options.usage_error("generate: --system without --chat, wanted both")
  end
  if values.greedy then
    beside({ "temperature", "top-k", "top-p", "min-p" }, "--greedy")
  elseif values.temperature == 0 then
    beside({ "top-k", "top-p", "min-p" }, "--temperature 0")
  end
end

local function chat_ids(tokenizer, prompt, values)
  local messages = {}
  if values.system ~= "" then
    messages[1] = { role = "system", content = values.system }
  end
  messages[#messages + 1] = { role = "user", content = prompt }
  return tokenizer:encode(tokenizer:apply_chat_template(messages, { add_generation_prompt = true }))
end

local function prompt_ids(model, tokenizer, words, values)
  if values.ids ~= "" then
    return model_cli.read_ids(values.ids, model)
  end
  model_cli.need_tokenizer(tokenizer, words[1])
  local prompt = model_cli.read_text(words[2])
  local ids
  if values.chat then
    if not tokenizer.chat_template then
      model_cli.fail(words[1] .. ": no chat template, wanted a prompt without --chat")
    end
    ids = chat_ids(tokenizer, prompt, values)
  else
    ids = tokenizer:encode(prompt, { special = true })
  end
  if #ids == 0 then
    model_cli.fail("generate: the prompt is empty")
  end
  return ids
end

-- The tokens to make; where nothing was said no more than the context leaves.
local function num_tokens(model, prompt, max_new, was_given)
  local context = model.config.max_position_embeddings
  if not was_given and context and #prompt < context then
    return math.min(max_new, context - #prompt)
  end
  return max_new
end

local function printer(tokenizer)
  local stream = tokenizer and tokenizer:stream({ skip_special = true })
  return function(_, id)
    io.write(stream and stream:push(id) or id .. " ")
    io.flush()
  end, function()
    io.write(stream and stream:finish() or "", "\n")
  end
end

function M.main(args, globals)
  local values, words, given = model_cli.parse(command, args, globals)
  if not values then
    return 0
  end
  check_options(values, given)
  local C = require("liger.ffi").C
  local model, tokenizer = model_cli.load(words[1], values)
  local prompt = prompt_ids(model, tokenizer, words, values)
  local on_token, at_end
  if not values.json then
    on_token, at_end = printer(tokenizer)
  end
  C.lg_sys_catch_interrupt(true)
  local result = require("liger.rollout").generate(model, { prompt }, {
    max_new = num_tokens(model, prompt, values["max-new"], given["max-new"]),
    temperature = values.temperature,
    top_k = values["top-k"],
    top_p = values["top-p"],
    min_p = values["min-p"],
    greedy = values.greedy,
    seed = values.seed,
    on_token = on_token,
    interrupted = function()
      return C.lg_sys_interrupted()
    end,
  })[1]
  if at_end then
    at_end()
  else
    local text = tokenizer and tokenizer:decode(result.ids, { skip_special = true }) or ""
    local line = { ids = result.ids, logp = result.logp, text = text }
    io.write(require("liger.data.json").encode(line, 9), "\n")
  end
  local status = C.lg_sys_interrupted() and 130 or 0
  C.lg_sys_catch_interrupt(false)
  return status
end

return M
