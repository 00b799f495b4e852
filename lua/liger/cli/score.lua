-- liger score: log-probability and entropy of each token of a text under a model.
local model_cli = require("liger.cli.model")

local M = {}

M.help = [[
usage: liger score MODEL TEXT [options]

Log-probability of each token after the first, given those before it, and the entropy (in nats) of
the distribution that it was drawn from. A TEXT of - is read from standard input.

  liger score models/SmolLM2-135M "The capital of France is Paris."
  liger score models/SmolLM2-135M --ids 504,3575,282 --json
]]

local command = {
  name = "score",
  help = M.help,
  words = { "MODEL", "TEXT" },
  keys = {
    { name = "ids", default = "", comment = "ids like 1,2,3 in place of the text" },
    { name = "json", default = false, comment = "print ids, logp and entropy as one object" },
  },
}

local function shown(tokenizer, id)
  if not tokenizer then
    return ""
  end
  return (("%q"):format(tokenizer:decode({ id })):gsub("\\\n", "\\n"))
end

local function print_table(ids, scored, tokenizer)
  local rows, wide, sum = {}, #"token", 0
  for i, id in ipairs(ids) do
    local logp, entropy = scored.logp[i - 1], scored.entropy[i - 1]
    rows[i] = { id, shown(tokenizer, id), logp and ("%.4f"):format(logp) or "", entropy }
    rows[i][4] = entropy and ("%.4f"):format(entropy) or ""
    wide = math.max(wide, #rows[i][2])
    sum = sum + (logp or 0)
  end
  local form = "%7s  %-" .. wide .. "s  %9s  %8s"
  io.write(form:format("id", "token", "logp", "entropy"), "\n")
  for _, row in ipairs(rows) do
    io.write((form:format(unpack(row)):gsub("%s+$", "")), "\n")
  end
  local mean = sum / (#ids - 1)
  local last = "mean logp %.4f  perplexity %.5g  tokens %d"
  io.write(last:format(mean, math.exp(-mean), #ids - 1), "\n")
end

function M.main(args, globals)
  local values, words = model_cli.parse(command, args, globals)
  if not values then
    return 0
  end
  local model, tokenizer = model_cli.load(words[1], values)
  local ids
  if values.ids ~= "" then
    ids = model_cli.read_ids(values.ids, model)
  else
    model_cli.need_tokenizer(tokenizer, words[1])
    ids = tokenizer:encode(model_cli.read_text(words[2]), { special = true })
  end
  if #ids < 2 then
    model_cli.fail(("score: %d token%s, wanted at least two"):format(#ids, #ids == 1 and "" or "s"))
  end
  local scored = require("liger.rollout.score").sequences(model, { ids })[1]
  if values.json then
    local line = { ids = ids, logp = scored.logp, entropy = scored.entropy }
    io.write(require("liger.data.json").encode(line, 9), "\n")
  else
    print_table(ids, scored, tokenizer)
  end
  return 0
end

return M
