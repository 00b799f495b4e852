-- What is computed with tensors beside the ops themselves, in one table: new tensors, arithmetic,
-- losses on logits, the vocabulary's head.
local logits = require("liger.logits")

local M = {
  logprob = logits.logprob, entropy = logits.entropy, cross_entropy = logits.cross_entropy,
}

for _, module in ipairs({
  require("liger.create"), require("liger.arithmetic"), require("liger.head"),
}) do
  for name, f in pairs(module) do
    M[name] = f
  end
end

return M
