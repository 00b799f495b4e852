-- Every example of the commands' help and of the README, against the options there are.
local helper = require("spec.helper")

-- Runs a command line with --help behind it: what stands before is read first, and refused where it
-- is wrong.
local function run(words)
  local pipe = io.popen(("build/%s --help </dev/null 2>&1; echo $?"):format(words))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.-)(%d+)\n$")
  return output, tonumber(status)
end

local function check(line)
  -- Two spaces part a command from what is said of it.
  local words = (line:match("^(.-)  ") or line):gsub("%s*<.*$", ""):gsub("%s+%-%-help$", "")
  -- FILE and MODEL stand in a synopsis, which is no example.
  if words:find("%f[%w]%u%u%u%u+%f[%W]") or words:find("^liger %-") then
    return
  end
  local output, status = run(words)
  assert.equal(0, status, line .. "\n" .. output)
  if words:find("^liger run ") then
    local has_model = words:find("--model", 1, true) ~= nil
    assert.equal(has_model, words:find("--data", 1, true) ~= nil, line)
  end
end

describe("the commands shown", function()
  local files = { "README.md" }
  for _, name in ipairs(helper.list("lua/liger/cli")) do
    files[#files + 1] = "lua/liger/cli/" .. name
  end
  for _, path in ipairs(files) do
    it("in " .. path .. " are right", function()
      for line in helper.read(path):gmatch("\n  +(liger [^\n]*)") do
        check(line)
      end
    end)
  end
end)
