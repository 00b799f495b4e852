-- Which device the program runs on, set before anything opens a context; and which of several
-- processes this one is, as mpirun and srun tell each in its environment.
local function number(...)
  for _, name in ipairs({ ... }) do
    local value = tonumber((os.getenv(name) or ""):match("^%d+"))
    if value then
      return value
    end
  end
end

local M = {
  -- "auto" (a CUDA device when there is one), "cpu" or "cuda:N"
  name = os.getenv("LIGER_DEVICE") or "auto",
  rank = number("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") or 0,
  size = number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS") or 1,
  -- among those of this machine
  local_rank = number("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID") or 0,
  local_size = number(
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"
  ) or 1,
}

--- The CUDA device of "auto": one for each process of the machine, of those that it may see.
---@return integer
function M.ordinal()
  local visible = os.getenv("CUDA_VISIBLE_DEVICES") or ""
  local _, count = visible:gsub("[^,]+", "")
  return count > 0 and M.local_rank % count or M.local_rank
end

--- The threads that this process takes, of those that the system lets it have: where mpirun or srun
--- has not given each process its own cores, they are shared out among the machine's processes.
---@param threads integer
---@return integer
function M.share_of(threads)
  if M.local_size == 1 or number("OMPI_MCA_orte_bound_at_launch", "SLURM_CPUS_PER_TASK") then
    return threads
  end
  return math.max(1, math.floor(threads / M.local_size))
end

return M
