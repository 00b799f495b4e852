-- What the commands that take a model share: its options, loading it, ids from the command line.
local options = require("liger.train.options")

local M = {}

--- A user's mistake that is no wrong use of options: exit status 1.
---@param message string
function M.fail(message)
  error({ message = message, code = 1 }, 0)
end

--- Refuses a word or an option beside one that leaves it without effect.
function M.refuse_both(command, name, other)
  options.usage_error(("%s: %s beside %s, wanted one of them"):format(command.name, name, other))
end

--- Reads a command's arguments; prints its help where that is asked for.
---@param command { name: string, help: string, keys: liger.Key[], words: string[] }
---@param args string[]     what follows the command
---@param globals string[]  options that stood before it
---@return table|nil values  nil: the help was printed
---@return string[] words
---@return table<string, boolean> given  by name
function M.parse(command, args, globals)
  local all = {}
  for _, list in ipairs({ globals, args }) do
    for _, word in ipairs(list) do
      all[#all + 1] = word
    end
  end
  local keys = {}
  for _, key in ipairs(command.keys) do
    keys[#keys + 1] = key
  end
  for _, name in ipairs({ "seed", "threads", "dtype", "device" }) do
    keys[#keys + 1] = options.common[name]
  end
  local values, words, help, given = options.parse(keys, all, #command.words)
  if help then
    io.write(command.help, "\n", options.columns(keys))
    return nil, words
  end
  for i, name in ipairs(command.words) do
    local is_optional = i == 2 and values.ids and values.ids ~= ""
    if is_optional and words[i] then
      M.refuse_both(command, name, "--ids")
    elseif not words[i] and not is_optional then
      options.usage_error(("%s: no %s; `liger %s --help`"):format(command.name, name, command.name))
    end
  end
  return values, words, given
end

--- Loads the model with the options' dtype and threads.
---@return liger.Decoder model
---@return liger.Tokenizer|nil tokenizer
function M.load(path, values)
  if values.threads > 0 then
    require("liger.ffi").set_threads(values.threads)
  end
  return require("liger.model").load(path, { dtype = values.dtype })
end

--- Raises unless there is a tokenizer.
function M.need_tokenizer(tokenizer, path)
  if not tokenizer then
    M.fail(("%s: no tokenizer.json, use --ids"):format(path))
  end
end

--- Ids from "1,2,3", each in the vocabulary.
---@param text string
---@param model liger.Decoder
---@return integer[]
function M.read_ids(text, model)
  local ids, vocab = {}, model.config.vocab_size
  for word in (text .. ","):gmatch("%s*([^,]*),") do
    local id = word:match("^%d+%s*$") and tonumber(word)
    if not id then
      options.usage_error(("--ids: got %q, wanted whole numbers like 1,2,3"):format(text))
    elseif id >= vocab then
      options.usage_error(("--ids: %d is outside of the vocabulary of %d"):format(id, vocab))
    end
    ids[#ids + 1] = id
  end
  return ids
end

--- The text that a word of the command line stands for: `-` is all of standard input.
function M.read_text(word)
  if word ~= "-" then
    return word
  end
  return (io.read("*a"):gsub("\r?\n$", ""))
end

return M
