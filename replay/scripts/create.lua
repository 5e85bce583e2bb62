-- create: writes the run's settings; refuses other values for frozen ones.
-- ARGV: 3 JSON of frozen fields {name: text}, 4 JSON of changeable fields.
-- Before: each has exactly its fields, with values that a ledger can run with.
-- After: meta holds both. Answer: JSON {"created": bool, "differ": {name: held text}}; where
-- "differ" isn't empty, nothing was written.
local wrong = called('create', 4) or object(3, 'frozen fields') or object(4, 'changeable fields')
if wrong then return wrong end

local function is_whole(least, most)
  return function(value)
    return #value < 15 and string.find(value, '^%d+$')
      and is_count(tonumber(value), least, most), 'a whole number from ' .. least
  end
end
local function is_text(value) return #value <= TEXT_BYTES and is_utf8(value), 'text' end
local function is_sources(value)
  local sources = decoded(value, '[')
  local n = length_of(sources) or 0
  for i = 1, n do
    local source = sources[i]
    if length_of(source) ~= 3 or type(source[1]) ~= 'string' or not is_count(source[2], 1)
        or not is_count(source[3], 1) then
      n = 0
    end
  end
  return n > 0, 'a JSON list of [name, problems, weight]'
end
local function is_mean(value) return is_reward(value), 'a finite number or nothing' end
local FROZEN = {
  sources = is_sources, data_digest = is_text, group_size = is_whole(1), window = is_whole(1),
  groups_per_step = is_whole(1, 1048576), max_staleness = is_whole(0), max_attempts = is_whole(1),
  pass_length = is_whole(1, MOST_SERIAL), least_verdicts = is_whole(1, 2),
  sorted_up_to = is_whole(0, MOST_SERIAL),
  seed = function(value) return #value < 21 and string.find(value, '^%-?%d+$'), 'a number' end,
  late = function(value) return value == 'wait' or value == 'drop', 'wait or drop' end,
  traces_when = function(value)
    return value == 'always' or value == 'all_failed', 'always or all_failed'
  end,
}
local LATER = {least_verdicts = true, traces_when = true, sorted_up_to = true} -- ledgers that were created before don't have these
local CHANGEABLE = {
  steps = is_whole(0), passes = is_whole(0), total_groups = is_whole(0, MOST_SERIAL + 1),
  lease_ms = is_whole(0, 1e13), group_deadline_ms = is_whole(0, 1e13),
  max_inflight = is_whole(1), group_bytes = is_whole(0), offline = is_whole(0, 1),
  dynamic_sampling = is_whole(0), least_mean = is_mean, greatest_mean = is_mean,
}

-- A refusal where the fields aren't exactly those named, each with a value that fits.
local function misfit(fields, fit)
  for name in pairs(fit) do
    if fields[name] == nil then return refuse('setting ' .. name .. ' is missing') end
  end
  for name, value in pairs(fields) do
    if not fit[name] then return refuse('there is no setting ' .. shown(name)) end
    if type(value) ~= 'string' then return refuse('setting ' .. name .. " isn't text") end
    local fits, wanted = fit[name](value)
    if not fits then return refuse('setting ' .. name .. ' is ' .. shown(value) .. ', not ' .. wanted) end
  end
end

local frozen, changeable = cjson.decode(ARGV[3]), cjson.decode(ARGV[4])
wrong = misfit(frozen, FROZEN) or misfit(changeable, CHANGEABLE)
if wrong then return wrong end
if tonumber(frozen.window) > tonumber(frozen.max_staleness) + 1 then
  return refuse('setting window is ' .. frozen.window .. ', not at most max_staleness + 1')
end
if (tonumber(changeable.steps) == 0) == (tonumber(changeable.passes) == 0)
    or tonumber(changeable.total_groups)
      ~= tonumber(changeable.passes) * tonumber(frozen.pass_length) then
  return refuse('a ledger ends after steps or after passes of pass_length groups, and the settings '
    .. 'are steps ' .. changeable.steps .. ', passes ' .. changeable.passes .. ', total_groups '
    .. changeable.total_groups .. ', pass_length ' .. frozen.pass_length)
end

local given = first_answer()
if given then return given end
local name = key('meta')
local created = redis.call('hget', name, 'created') == false
if created then
  redis.call('hset', name, 'created', now_ms(), 'term', 0, 'journalled', 0, 'cursor', 0,
    'trimmed', 0)
  redis.call('hsetnx', name, 'state', 'running')
  redis.call('set', key('server'), server_life()) -- else the first lease to expire had two lives
  for field, value in pairs(frozen) do redis.call('hset', name, field, value) end
else
  local differ, any = {}, false
  for field, value in pairs(frozen) do
    local held = redis.call('hget', name, field)
    if held ~= value and (held or not LATER[field]) then
      differ[field] = held or ''
      any = true
    end
  end
  if any then return answer(cjson.encode({created = false, differ = differ})) end
end
even_when_full() -- a full run can be resumed
for field, value in pairs(changeable) do redis.call('hset', name, field, value) end
-- A run that ended at its last step goes on where it now has more of them.
local now = redis.call('hmget', name, 'ended', 'journalled', 'steps', 'total_groups', 'cursor')
if now[1] then
  local steps, groups = tonumber(now[3]), tonumber(now[4])
  if (steps > 0 and steps > tonumber(now[2])) or (groups > 0 and groups > tonumber(now[5])) then
    redis.call('hdel', name, 'ended')
  end
end
hint('taken')
return answer(cjson.encode({created = created, differ = {}}))
