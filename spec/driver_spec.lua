-- What is said of a GPU that cannot be used. Runs where the CUDA backend is built.
local helper = require("spec.helper")

local function run(environment)
  local pipe = io.popen(environment .. " build/liger -e 'print(1)' --device cuda:0 2>&1; echo $?")
  local text = pipe:read("*a")
  pipe:close()
  return text
end

if not helper.exists("build/libliger_cuda.so") then
  print("skipped: spec/driver_spec.lua: the CUDA backend is not built")
  return
end

describe("a GPU that cannot be used", function()
  if not helper.exists("/dev/nvidiactl") then
    it("for want of a driver is said in one line", function()
      assert.equal("liger: cuda: there is no NVIDIA driver\n1\n", run(""))
    end)
  end

  it("for an old driver is said in one line", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert.equal(0, os.execute(
      ("mkdir %s && cc -shared -fPIC -o %s/libcuda.so.1 spec/fixtures/old_driver.c"):format(
        folder, folder
      )
    ))
    local text = run("LD_LIBRARY_PATH=" .. folder)
    os.execute("rm -r " .. folder)
    assert.matches("^liger: cuda: the driver knows CUDA 11%.4, wanted %d+%.%d or newer\n1\n$", text)
  end)
end)
