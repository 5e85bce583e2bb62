-- take: graded -> taken(n): writes row n, or gives it again as it was written.
-- ARGV: 3 step n, 4 term.
-- Before: the caller has the newest term; n <= J + 1.
-- n <= J: the row, without a sweep. n = J + 1: sweeps (graded groups that are too old become
-- rejected(stale, n), and up to a limit those in which all rows have one reward, or whose mean reward
-- is out of bounds, rejected(no_signal, n))
-- and cuts the B first groups; J becomes n. Nothing else is written where too few are left, or where
-- the cut would pass over more than the window allows.
-- Answer: '{"row": ..., "quarantined": ...}', '{"waiting": ...}' or '{"ended": true}'.
local wrong = called('take', 4) or whole(3, 'step') or whole(4, 'term')
if wrong then return wrong end
local m, missing = meta('term', 'journalled', 'cursor', 'trimmed', 'groups_per_step',
  'max_staleness', 'window', 'late', 'max_attempts', 'steps', 'total_groups', 'pass_length',
  'ended', 'state', 'traces_when', 'group_size', 'seed', 'dynamic_sampling', 'least_mean',
  'greatest_mean', 'left_out')
if not m then return missing end
local step = tonumber(ARGV[3])
local refused = fenced(m.term, ARGV[4])
if refused then return refused end

local function whole(row)
  local reason = redis.call('hget', key('quarantined'), step)
  return '{"row":' .. row .. ',"quarantined":' .. cjson.encode(reason or '') .. '}'
end

if step <= m.journalled then
  local row = redis.call('hget', key('rows'), step)
  if row then return whole(row) end
  return redis.error_reply('REFUSED row ' .. step .. ' is before the oldest checkpoint kept (' ..
    m.trimmed .. '), so its samples were let go: resume from that checkpoint or a later one')
end
if step > m.journalled + 1 then
  return redis.error_reply('REFUSED row ' .. step .. ' can not be taken: ' .. m.journalled ..
    ' rows are written, the next one is ' .. (m.journalled + 1))
end
if m.ended or (m.steps > 0 and step > m.steps) then return '{"ended":true}' end

expire_due(now_ms(), m)
local swept = redis.call('zrangebyscore', key('ages'), '-inf',
  '(' .. (step - 1 - m.max_staleness))
for _, serial in ipairs(swept) do reject(tonumber(serial), 'stale', step, m.pass_length) end
if #swept > 0 then hint('taken') end

local function waiting(why, serial)
  local waited = waited_for(m, serial)
  waited.run_state = m.state
  if why then waited.reason = why .. '; ' .. waited.reason end
  return '{"waiting":' .. cjson.encode(waited) .. '}'
end

local size = m.groups_per_step

-- Traces that were chosen at admission, or none where they enter groups that all failed and this one
-- hasn't. JSON.
local function entering(traces, correct)
  if m.traces_when == 'all_failed' and tonumber(correct or 1) > 0 then return '[]' end
  return traces
end

-- Whether all rows of a graded group have one reward, those of its traces included, or their mean is
-- out of bounds. Of a reward that isn't known it isn't said.
local EQUAL_REWARDS = 1e-6
local function has_no_signal(serial)
  local known = redis.call('hmget', group_key(serial), 'least', 'greatest', 'traces', 'correct',
    'total', 'rewards')
  local least, greatest = tonumber(known[1] or ''), tonumber(known[2] or '')
  if not least or not greatest then return false end
  local total, count = tonumber(known[5] or ''), tonumber(known[6] or '')
  local traces = cjson.decode(entering(known[3], known[4]))
  if #traces > 0 then
    for _, reward in ipairs(redis.call('hmget', key('trace_rewards'), unpack(traces))) do
      reward = tonumber(reward or '')
      if not reward then return false end
      least, greatest = math.min(least, reward), math.max(greatest, reward)
      if total then total, count = total + reward, count + 1 end
    end
  end
  if greatest - least <= EQUAL_REWARDS then return true end
  if not total or not m.least_mean then return false end
  local mean = total / count
  return mean < m.least_mean - EQUAL_REWARDS or mean > m.greatest_mean + EQUAL_REWARDS
end

-- Dynamic sampling: groups that teach nothing give way to later ones. Only those that a cut may come
-- to, whatever becomes of the groups that aren't finished, so that in strict order the same ones go
-- however fast each worker is.
local left = (m.dynamic_sampling or 0) - (m.left_out or 0)
if left > 0 then
  local most = (m.window - 1) * size
  local unfinished = {}
  for _, set in ipairs({'leased', 'returned'}) do
    local found = redis.call('zrange', key(set), 0, most, 'withscores')
    for i = 2, #found, 2 do unfinished[#unfinished + 1] = tonumber(found[i]) end
  end
  table.sort(unfinished)
  local before = '+inf'
  if unfinished[most + 1] then before = string.format('(%.17g', unfinished[most + 1]) end
  local kept, left_out = 0, 0
  for _, serial in ipairs(redis.call('zrangebyscore', key('graded'), '-inf', before, 'limit', 0,
      size + left)) do
    if kept == size or left_out == left then break end
    if has_no_signal(serial) then
      reject(tonumber(serial), 'no_signal', step, m.pass_length)
      left_out = left_out + 1
    else
      kept = kept + 1
    end
  end
  if left_out > 0 then
    m.left_out = redis.call('hincrby', key('meta'), 'left_out', left_out)
    hint('taken')
  end
end

local cut = redis.call('zrange', key('graded'), 0, size - 1)
local short = false
if #cut < size then
  local all_leased = m.total_groups > 0 and m.cursor >= m.total_groups
  if not all_leased or redis.call('zcard', key('leased')) > 0
      or redis.call('zcard', key('returned')) > 0 then
    return waiting()
  end
  if #cut == 0 then
    -- From now on no group may come back (retry). A delete comes first: see reject.
    redis.call('hdel', key('meta'), 'ended')
    redis.call('hset', key('meta'), 'ended', 'all its groups are in rows or rejected')
    return '{"ended":true}'
  end
  short = true
end

-- Unfinished ids before the cut's last one: those that it would pass over.
local below = '(' .. redis.call('zscore', key('graded'), cut[#cut])
local back = redis.call('zcount', key('returned'), '-inf', below)
local passed = redis.call('zcount', key('leased'), '-inf', below) + back
if passed > (m.window - 1) * size then return waiting('strict order or the window holds') end
if passed > 0 then
  local unfinished = redis.call('zrangebyscore', key('leased'), '-inf', below, 'withscores')
  local late = {}
  for i = 1, #unfinished, 2 do
    local serial, place = unfinished[i], unfinished[i + 1]
    local rank = (i - 1) / 2
    if back > 0 then
      rank = rank + redis.call('zcount', key('returned'), '-inf', '(' .. place)
    end
    local held = tonumber(redis.call('hget', group_key(serial), 'step'))
    if step + math.floor(rank / size) - held > m.max_staleness then late[#late + 1] = serial end
  end
  if #late > 0 and m.late == 'wait' then
    return waiting('the cut would make it too stale', late[1])
  end
  for _, serial in ipairs(late) do
    release(serial, false, 'revoked: it would become too stale', m)
    -- Its late commit is superseded: the next lease has another number.
    redis.call('hincrby', group_key(serial), 'attempt', 1)
  end
end

-- A row is told by position, also where a group that was put back came later.
table.sort(cut, function(one, other) return tonumber(one) < tonumber(other) end)

-- The traces of a row, and places of the own samples that give way to them: where traces enter groups
-- that all failed, they replace samples without a verdict, which are no rows, and then the own rows
-- whose SHA-1 of (seed, step, id, place) is least. JSON; '' where none gives way.
local function mixed(id, traces, correct, own_rows)
  traces = entering(traces, correct)
  if m.traces_when ~= 'all_failed' or traces == '[]' then return traces, '' end
  local rows, drawn, chosen = cjson.decode(own_rows), {}, {}
  for i, place in ipairs(rows) do
    drawn[i] = {redis.sha1hex(table.concat({'replaced', m.seed, step, id, place}, ':')), place}
  end
  table.sort(drawn, function(one, other) return one[1] < other[1] end)
  for i = 1, math.min(#rows, #rows + #cjson.decode(traces) - m.group_size) do
    chosen[i] = drawn[i][2]
  end
  table.sort(chosen)
  if #chosen == 0 then return traces, '' end
  return traces, ',"replaced":[' .. table.concat(chosen, ',') .. ']'
end

local finals, taken, names, entries = {}, {}, {}, {}
for i, serial in ipairs(cut) do
  local known = redis.call('hmget', group_key(serial), 'attempt', 'digest', 'bytes', 'traces',
    'correct', 'own_rows')
  local id = id_of(tonumber(serial), m.pass_length)
  local traces, replaced = mixed(id, known[4], known[5], known[6])
  finals[i] = {tonumber(serial), 'T:' .. step .. ':' .. known[1]}
  taken[2 * i - 1], taken[2 * i] = step, serial
  names[i] = group_key(serial)
  entries[i] = string.format('{"id":"%s","attempt":%s,"digest":"%s","bytes":%s,"traces":%s%s}',
    id, known[1], known[2], known[3], traces, replaced)
end
-- Deletes first: when Redis is full, a script may write only after it has deleted.
redis.call('zremrangebyrank', key('graded'), 0, #cut - 1)
many(cut, 'zrem', key('ages'))
many(names, 'unlink')
set_finals(finals)
many(taken, 'zadd', key('taken'))
local left_out = ''
if m.left_out then
  left_out = ',"left_out":' .. m.left_out
  redis.call('hdel', key('meta'), 'left_out')
end
local row = string.format('{"step":%d,"short":%s,"groups":[%s]%s}', step, tostring(short),
  table.concat(entries, ','), left_out)
redis.call('hset', key('rows'), step, row)
redis.call('hset', key('meta'), 'journalled', step)
hint('taken')
return whole(row)
