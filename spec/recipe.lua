-- Recipes as they are run, through the program, in a folder of the spec's own.
local cjson = require("cjson")

local M = {}

local root, count

--- Makes the folder; a spec's setup.
---@return string
function M.open()
  root, count = os.tmpname(), 0
  os.remove(root)
  assert(os.execute(("mkdir %q"):format(root)))
  return root
end

--- Removes it; a spec's teardown.
function M.close()
  os.execute(("rm -r %q"):format(root))
end

--- Writes a file into the folder; its path.
function M.write(name, text)
  local file = assert(io.open(root .. "/" .. name, "w"))
  file:write(text)
  file:close()
  return root .. "/" .. name
end

--- The values of a JSON lines file.
function M.lines_of(path)
  local rows = {}
  for line in io.lines(path) do
    rows[#rows + 1] = cjson.decode(line)
  end
  return rows
end

--- Tables of options become one; later ones win.
function M.with(...)
  local y = {}
  for _, options in ipairs({ ... }) do
    for key, value in pairs(options) do
      y[key] = value
    end
  end
  return y
end

--- Output and exit status of a recipe, or of a Lua file by its path; an option that is true has no
--- value. No checkpoints, unless save_steps says so.
function M.start(recipe, options)
  local words = {}
  for key, value in pairs(M.with({ save_steps = 0 }, options)) do
    local text = value == true and "" or (" %q"):format(tostring(value))
    words[#words + 1] = "--" .. key:gsub("_", "-") .. text
  end
  local path = recipe:find("/") and recipe or ("recipes/%s.lua"):format(recipe)
  local line = "build/liger run %s --quiet %s 2>&1; echo $?"
  local pipe = io.popen(line:format(path, table.concat(words, " ")))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.-)(%d+)\n$")
  return output, tonumber(status)
end

--- Runs a recipe to its end; the run: output, folder, metrics without timings, of one phase:
--- phase(name).
function M.run(recipe, options)
  count = count + 1
  local folder = ("%s/run-%d"):format(root, count)
  local output, status = M.start(recipe, M.with(options, { out = folder }))
  assert(status == 0, ("%s ended with %s: %s"):format(recipe, tostring(status), output))
  local metrics = M.lines_of(folder .. "/metrics.jsonl")
  for _, line in ipairs(metrics) do
    assert(type(line.step_time) == "number")
    line.step_time, line.tokens_per_second = nil, nil
  end
  return {
    output = output, folder = folder, metrics = metrics,
    phase = function(name)
      local list = {}
      for _, line in ipairs(metrics) do
        list[#list + 1] = line.phase == name and line or nil
      end
      return list
    end,
  }
end

--- The values of a metric, line by line.
function M.column(lines, name)
  local list = {}
  for i, line in ipairs(lines) do
    list[i] = line[name]
  end
  return list
end

--- Fails where a number of a run's metrics is not finite.
function M.finite(run)
  for _, line in ipairs(run.metrics) do
    for name, value in pairs(line) do
      assert(type(value) ~= "number" or value - value == 0, name)
    end
  end
end

return M
