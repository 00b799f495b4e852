-- What a run shows: one live line on a terminal, plain lines anywhere else, nothing when quiet.
-- Knows no run; it is given the facts of a step and draws them.
local M = {}

local Progress = {}
Progress.__index = Progress

local LIVE_S = 0.1 -- between two drawings of the live line
local PLAIN_S = 2 -- between two plain lines, or
local PLAIN_STEPS = 50

local shown = { "reward", "loss", "accuracy", "grad_norm" }

---@class liger.ProgressOptions
---@field write fun(text: string)
---@field clock fun(): number      seconds
---@field columns? fun(): integer  width of the terminal; nil: not a terminal
---@field quiet? boolean

--- A progress display.
---@param options liger.ProgressOptions
function M.new(options)
  return setmetatable({
    write = options.write,
    clock = options.clock,
    columns = options.columns,
    quiet = options.quiet,
    drawn = false, -- whether the live line is on the screen
    drawn_at = -math.huge,
  }, Progress)
end

--- "4:05", "1:02:03".
function M.duration(seconds)
  seconds = math.floor(seconds + 0.5)
  local hours, minutes = math.floor(seconds / 3600), math.floor(seconds / 60) % 60
  if hours > 0 then
    return ("%d:%02d:%02d"):format(hours, minutes, seconds % 60)
  end
  return ("%d:%02d"):format(minutes, seconds % 60)
end

-- 950, 12.3k, 4.56M
local function count(n)
  if n >= 1e6 then
    return ("%.3gM"):format(n / 1e6)
  elseif n >= 1e4 then
    return ("%.3gk"):format(n / 1e3)
  end
  return ("%.0f"):format(n)
end

local function fields(facts)
  local list = {}
  for _, name in ipairs(shown) do
    local value = facts.values[name]
    if value then
      list[#list + 1] = ("%s %.4g"):format(name, value)
    end
  end
  if facts.tokens_per_second then
    list[#list + 1] = count(facts.tokens_per_second) .. " tokens/s"
  end
  if facts.live_bytes then
    list[#list + 1] = ("%.0f MiB"):format(facts.live_bytes / 2 ^ 20)
  end
  if facts.seconds_left then
    list[#list + 1] = M.duration(facts.seconds_left) .. " left"
  end
  return list
end

-- As many fields as the width takes (nil: all).
local function line_of(facts, width)
  local line = ("step %d/%d"):format(facts.step, facts.total)
  line = facts.phase and facts.phase .. " " .. line or line
  for _, field in ipairs(fields(facts)) do
    if width and #line + 2 + #field > width then
      break
    end
    line = line .. "  " .. field
  end
  return line:sub(1, width or -1)
end

function Progress:_erase()
  if self.drawn then
    self.write("\r\27[K")
    self.drawn = false
  end
end

function Progress:_draw_live(facts, now)
  self:_erase()
  self.write(line_of(facts, math.max(self.columns() - 1, 10)))
  self.drawn, self.drawn_at, self.last = true, now, facts
end

---@class liger.StepFacts
---@field step integer
---@field total integer
---@field phase? string
---@field values table<string, number>  the last logged metrics
---@field tokens_per_second? number
---@field live_bytes? number
---@field seconds_left? number

--- Shows a step, where it is time to.
---@param facts liger.StepFacts
function Progress:update(facts)
  if self.quiet then
    return
  end
  local now, is_last = self.clock(), facts.step >= facts.total
  if self.columns then
    if is_last or now - self.drawn_at >= LIVE_S then
      self:_draw_live(facts, now)
    else
      self.last = facts
    end
    return
  end
  local is_due = not self.plain_step
    or facts.step - self.plain_step >= PLAIN_STEPS
    or now - self.drawn_at >= PLAIN_S
  if is_last or is_due then
    self.write(line_of(facts) .. "\n")
    self.plain_step, self.drawn_at = facts.step, now
    self.last = nil
  else
    self.last = facts
  end
end

--- Prints a line of text above the live line, also when quiet.
---@param text string
function Progress:print(text)
  local was_drawn = self.drawn
  self:_erase()
  self.write(text .. "\n")
  if was_drawn and self.last then
    self:_draw_live(self.last, self.clock())
  end
end

--- Ends a phase: the last step stays on the screen.
function Progress:close()
  local last = self.last
  if last and not self.quiet then
    if self.columns then
      self:_draw_live(last, self.clock())
    else
      self.write(line_of(last) .. "\n")
    end
  end
  if self.drawn then
    self.write("\n")
  end
  self.drawn, self.last, self.plain_step, self.drawn_at = false, nil, nil, -math.huge
end

return M
