-- Numbers from PyTorch and TRL (spec/fixtures/losses/README.md): every case of what is built, in
-- f64 and f32. What is not built yet is counted and named in one line.
local helper = require("spec.helper")
local cjson = require("cjson")

local TOLERANCE = { f64 = { 1e-10, 1e-10 }, f32 = { 1e-5, 1e-4 } }

local IS_FLOAT = { f32 = true, f64 = true }

local function load_case(path, name)
  local tensors, metadata = helper.read_tensors(path)
  local flags = {}
  for _, flag in ipairs(cjson.decode(metadata.flags)) do
    flags[flag] = true
  end
  local case = { name = name, op = metadata.op, options = cjson.decode(metadata.options),
    drawing = cjson.decode(metadata.drawing), tensors = tensors, flags = flags }
  --- A copy in a dtype: floats in the one under test, unless said.
  function case.get(key, dtype)
    local x = tensors[key]
    return x and helper.to(x, dtype or (IS_FLOAT[x.dtype] and case.dtype or x.dtype))
  end
  return case
end

local function check(case, result)
  for key, wanted in pairs(case.tensors) do
    local kind = key:match("^%a+")
    if kind ~= "in" and kind ~= "up" and not (result.without and result.without[key]) then
      local exact = result.exact and result.exact[key]
      if exact then
        helper.close(exact, wanted, 0, case.name .. " " .. key)
      else
        local got = result[key]
        if got == nil and key == "out.loss" and #wanted.shape == 1 then
          got = result["out.rows"]
        end
        assert(got ~= nil, ("%s: %s is not compared"):format(case.name, key))
        helper.close(got, wanted, TOLERANCE[case.dtype][kind == "grad" and 2 or 1],
          case.name .. " " .. key)
      end
    end
  end
end

local folder = helper.golden_folder("losses")
local skipped, found, compared, wanted = {}, 0, {}, {}

local function runner_of(op)
  if not helper.exists("spec/golden/" .. op .. ".lua") then
    return {}
  end
  local runner = require("spec.golden." .. op)
  wanted[op] = runner.compared
  return runner
end

describe("golden numbers", function()
  for _, group in ipairs({ "layers", "linear", "logits", "optim" }) do
    for _, file in ipairs(helper.list(folder .. "/" .. group)) do
      local name = file:match("^(.*)%.safetensors$")
      if name then
        found = found + 1
        local case = load_case(("%s/%s/%s"):format(folder, group, file), name)
        local runner = runner_of(case.op)
        local run = runner.run
        case.dtype = "f64"
        local ok, built, reason = pcall(run or function() end, case)
        if not ok then
          it("of " .. name .. " can be run", function()
            error(built, 0)
          end)
        elseif not built and not runner.elsewhere then
          skipped[#skipped + 1] = name .. (reason and (" (%s)"):format(reason) or "")
        elseif built then
          compared[case.op] = (compared[case.op] or 0) + 1
          local dtypes = runner.only_f64 and "f64" or "f64 and f32"
          it("of " .. name .. " are those in " .. dtypes, function()
            check(case, built)
            if not runner.only_f64 then
              case.dtype = "f32"
              check(case, (run(case)))
            end
          end)
        end
      end
    end
  end

  it("are there", function()
    assert(found > 0, "no files in " .. folder)
    assert.same(wanted, compared)
    print(
      ("\ngolden numbers: %d of %d cases are not built yet: %s"):format(#skipped, found,
        table.concat(skipped, ", "))
    )
  end)
end)
