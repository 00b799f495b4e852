-- Every example of every command's help, against the options there are.
local helper = require("spec.helper")

-- Runs a command line of a help text with --help behind it: what stands before is read first, and
-- refused where it is wrong.
local function run(words)
  words = words:gsub("%s*<.*$", "")
  local pipe = io.popen(("build/%s --help </dev/null 2>&1; echo $?"):format(words))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.-)(%d+)\n$")
  return output, tonumber(status)
end

describe("the help of", function()
  for _, name in ipairs(helper.list("lua/liger/cli")) do
    local text = helper.read("lua/liger/cli/" .. name)
    it(name .. " shows commands that are right", function()
      for line in text:gmatch("\n  (liger [^\n]*)") do
        -- Two spaces part a command from what is said of it.
        local words = line:match("^(.-)  ") or line
        -- FILE and MODEL stand in a synopsis, which is no example.
        if not words:find("%f[%w]%u%u%u%u+%f[%W]") and not words:find("^liger %-") then
          local output, status = run((words:gsub("%s+%-%-help$", "")))
          assert.equal(0, status, line .. "\n" .. output)
          if words:find("^liger run ") then
            local has_model = words:find("--model", 1, true) ~= nil
            assert.equal(has_model, words:find("--data", 1, true) ~= nil, line)
          end
        end
      end
    end)
  end
end)
