-- Which device the program runs on: set before anything opens a context.
local M = {
  -- "auto" (a CUDA device when there is one), "cpu" or "cuda:N"
  name = os.getenv("LIGER_DEVICE") or "auto",
}

return M
