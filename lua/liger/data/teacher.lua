-- A teacher's log-probabilities from a file, for distillation without the teacher at hand. Line n
-- belongs to line n of the data: for each token of its completion (the end token among them) the
-- teacher's likeliest ids and their log-probabilities at temperature 1, in nats:
--   {"ids": [[95, 12], [10]], "logprobs": [[-0.1, -2.6], [-0.001]]}
-- Lists may have unequal lengths. The probability that a list lacks is spread over the other tokens
-- in proportion to the student's own: a divergence then sees one more class, "any other token", and
-- the gradient says nothing about which.
local column = require("liger.data.column")
local jsonl = require("liger.data.jsonl")
local Tensor = require("liger.tensor")

local M = {}

local SLACK = 1e-3 -- by which rounded probabilities may add up to more than 1

local function is_id(id, vocab)
  return type(id) == "number" and id % 1 == 0 and id >= 0 and id < vocab
end

-- What is wrong with one token's lists, or nil.
local function problem_of(ids, logprobs, vocab)
  if type(ids) ~= "table" or type(logprobs) ~= "table" then
    return "no list, wanted ids and logprobs"
  elseif #ids ~= #logprobs or #ids == 0 then
    return ("%d ids and %d logprobs, wanted as many, at least one"):format(#ids, #logprobs)
  end
  local seen, total = {}, 0
  for k, id in ipairs(ids) do
    local logp = logprobs[k]
    if not is_id(id, vocab) then
      return ("id %s, wanted a whole number from 0 to %d"):format(tostring(id), vocab - 1)
    elseif seen[id] then
      return ("id %d twice"):format(id)
    elseif type(logp) ~= "number" or logp > 0 or logp ~= logp then
      return ("logprob %s, wanted a number up to 0"):format(tostring(logp))
    end
    seen[id], total = true, total + math.exp(logp)
  end
  if total > 1 + SLACK then
    return ("probabilities that add up to %.4f, wanted at most 1"):format(total)
  end
end

-- A sample that was cut on the right takes the lists of the tokens it kept.
local function check_row(path, row, sample, vocab)
  local length = #sample.completion
  for _, name in ipairs({ "ids", "logprobs" }) do
    if type(row[name]) ~= "table" or #row[name] < length
      or (#row[name] > length and not sample.cut) then
      local wanted = "a list for each of " .. column.count(length, "completion token")
      column.fail(path, row, "%s", type(row[name]) ~= "table"
        and column.is_wrong(name, row[name], wanted)
        or ("column `%s` has %s, wanted %s"):format(name, column.count(#row[name], "list"), wanted))
    end
  end
  for i = 1, length do
    local problem = problem_of(row.ids[i], row.logprobs[i], vocab)
    if problem then
      column.fail(path, row, "columns `ids` and `logprobs`: token %d has %s", i, problem)
    end
  end
end

--- Gives each sample the lists of its line, as `teacher`.
---@param path string
---@param samples table[]     of data.prompts.supervised
---@param vocab integer       ids are below it
function M.load(path, samples, vocab)
  local by_line = {}
  for _, row in ipairs(jsonl.rows(path)) do
    by_line[row._line] = row
  end
  for _, s in ipairs(samples) do
    local line = s.row._line
    local row = by_line[line]
    if not row then
      column.fail(path, { _line = line }, "the line is missing, wanted one for each of the data's")
    end
    check_row(path, row, s, vocab)
    s.teacher = row
  end
end

--- The packed batch with teacher_id [N,K] i32 and teacher_logp [N,K]: K is the longest list, -1 and
--- -inf stand where there is none.
---@param batch liger.Pack     of pack.completions
---@param samples table[]      the same, loaded
---@return liger.Pack batch
function M.attach(batch, samples)
  local K = 1
  for _, s in ipairs(samples) do
    for _, ids in ipairs(s.teacher.ids) do
      K = math.max(K, #ids)
    end
  end
  local N = batch.num_tokens
  local id, logp = Tensor.stage({ N, K }, "i32"), Tensor.stage({ N, K }, "f32")
  local id_data, logp_data = id:data(), logp:data()
  for i = 0, N * K - 1 do
    id_data[i], logp_data[i] = -1, -math.huge
  end
  local rows, k = batch.rows:read(), 0
  for _, s in ipairs(samples) do
    for t = 1, #s.completion do
      local at = rows[k] * K
      for j, value in ipairs(s.teacher.ids[t]) do
        id_data[at + j - 1], logp_data[at + j - 1] = value, s.teacher.logprobs[t][j]
      end
      k = k + 1
    end
  end
  batch.teacher_id, batch.teacher_logp = id, logp
  return batch
end

return M
