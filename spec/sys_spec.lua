-- A path that Lua forgot reaches C as NULL: an error, never a crash.
local helper = require("spec.helper")
local ffi = require("ffi")
local lib = require("liger.ffi")

local C = lib.C

describe("a path that is nil", function()
  it("is an invalid argument for the system's functions", function()
    local invalid = 22
    assert.equal(invalid, C.lg_sys_stat(nil, ffi.new("lg_sys_info")))
    assert.equal(invalid, C.lg_sys_stat("spec", nil))
    assert.equal(invalid, C.lg_sys_make_folders(nil))
    assert.equal(invalid, C.lg_sys_sync(nil))
    assert.equal(invalid, C.lg_sys_checksum(nil, ffi.new("char[17]")))
    assert.equal(invalid, C.lg_sys_checksum("spec", nil))
    assert.is_true(C.lg_sys_folder_open(nil) == nil)
    assert.is_true(C.lg_sys_folder_next(nil) == nil)
    assert.equal("Invalid argument", ffi.string(C.lg_sys_error(invalid)))
  end)

  it("is refused where files are opened and written", function()
    helper.raises(function()
      lib.check(C.lg_file_open(lib.ctx, nil, ffi.new("lg_file *[1]")))
    end, "file: path is NULL, wanted a text")
    helper.raises(function()
      lib.check(C.lg_safetensors_write(lib.ctx, nil, nil, nil, 0, nil))
    end, "safetensors: path is NULL, wanted a text")
    helper.raises(function()
      lib.check(C.lg_tokenizer_open(lib.ctx, nil, 0, ffi.new("lg_tokenizer *[1]")))
    end, "tokenizer: description is NULL, wanted a text")
  end)
end)
