-- reassert: rows that stand in the learner's journal and not in Redis are written again.
-- ARGV: 3 term, 4... rows as JSON, ascending by step.
-- Before: the caller has the newest term; each row is one that Redis has as well, or row J + 1; no
-- group of a new one stands in another row.
-- After: J is at least the last row; its groups are taken, whatever Redis thought of them; ids
-- that Redis had not come to yet and that stand in no row are admitted.
-- Answer: how many rows were written. A row that differs from Redis's own is refused, and then
-- nothing is written.
local wrong = called('reassert', 3, 1024) or whole(3, 'term')
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
local m, missing = meta('term', 'journalled', 'cursor', 'trimmed', 'pass_length', 'groups_per_step')
if not m then return missing end
local refused = fenced(m.term, ARGV[3])
if refused then return refused end

-- Ids between rows are those that were out or rejected; more would hold the server up.
local MOST_PASSED = 262144
local journalled, cursor, seen, fresh = m.journalled, m.cursor, {}, {}

local function ids_of(row)
  local ids = {}
  for i, entry in ipairs(row.groups) do
    ids[i] = entry.id .. '/' .. entry.attempt .. '/' .. entry.digest
  end
  return table.concat(ids, ' ')
end

-- Why a row isn't one that this ledger could have written, or nil; notes each group's serial.
local function misshapen(row)
  if type(row) ~= 'table' or not is_count(row.step, 1) or type(row.short) ~= 'boolean'
      or not is_count(row.left_out or 0) then
    return "isn't an object with a step, short and groups"
  end
  local n, before = length_of(row.groups), -1
  if not n or n == 0 or n > m.groups_per_step or (n < m.groups_per_step and not row.short) then
    return 'of step ' .. row.step .. ' has ' .. (n or 'no list of') .. ' groups, not '
      .. m.groups_per_step
  end
  for _, entry in ipairs(row.groups) do
    local serial = type(entry) == 'table' and serial_of(entry.id, m.pass_length)
    if not serial or serial <= before then
      return 'of step ' .. row.step .. ' has an id that is none or is out of order'
    end
    if not is_count(entry.attempt) or not is_count(entry.bytes) or type(entry.digest) ~= 'string'
        or #entry.digest > 64 or not string.find(entry.digest, '^%x+$')
        or not are_labels(entry.traces)
        or (entry.replaced ~= nil and not are_places(entry.replaced)) then
      return 'of step ' .. row.step .. ' has a damaged entry for group ' .. entry.id
    end
    entry.serial, before = serial, serial
  end
end

-- All rows are looked at before anything is written.
for i = 4, #ARGV do
  local row = decoded(ARGV[i], '{')
  local why = misshapen(row)
  if why then return refuse('the row in argument ' .. i .. ' ' .. why .. ': nothing was changed') end
  if row.step <= journalled then
    local held = row.step <= m.journalled and redis.call('hget', key('rows'), row.step)
    if fresh[row.step] or (held and ids_of(cjson.decode(held)) ~= ids_of(row)) then
      return redis.error_reply('REFUSED row ' .. row.step .. ' of the journal is not the one in '
        .. 'Redis: the run folder and this Redis are of different histories')
    end
  elseif row.step > journalled + 1 then
    return redis.error_reply('REFUSED row ' .. row.step .. ' of the journal can not follow row ' ..
      journalled .. ' in Redis: the journal has a gap')
  else
    for _, entry in ipairs(row.groups) do
      local letter, step, _, reason = get_final(entry.serial)
      if seen[entry.serial] or letter == 'T' or letter == 'D' or reason == 'quarantined' then
        return redis.error_reply('REFUSED row ' .. row.step .. ' of the journal holds group ' ..
          entry.id .. ', which stands in row ' .. (seen[entry.serial] or step) ..
          ' as well: the run folder and this Redis are of different histories')
      end
      if entry.serial - cursor > MOST_PASSED then
        return refuse('row ' .. row.step .. ' holds group ' .. entry.id .. ', ' ..
          (entry.serial - cursor) .. ' places past all that were leased: is the journal of this run?')
      end
      seen[entry.serial] = row.step
      cursor = math.max(cursor, entry.serial + 1)
    end
    journalled = row.step
    fresh[journalled] = row
  end
end

cursor = m.cursor
for step = m.journalled + 1, journalled do
  local row, entries = fresh[step], {}
  for i, entry in ipairs(row.groups) do
    local serial = entry.serial
    for _, set in ipairs({'leased', 'deadlines', 'returned', 'graded', 'ages'}) do
      redis.call('zrem', key(set), serial)
    end
    local known = redis.call('hmget', group_key(serial), 'attempt', 'digest')
    if known[2] and (known[2] ~= entry.digest or tonumber(known[1]) ~= entry.attempt) then
      redis.call('unlink', key('payload:' .. entry.id .. ':' .. known[1] .. ':' .. known[2]))
    end
    redis.call('unlink', group_key(serial))
    -- Put for a commit that Redis lost, it would expire.
    redis.call('persist', key('payload:' .. entry.id .. ':' .. entry.attempt .. ':' .. entry.digest))
    -- Redis may have lost that it was put back.
    forget_rejection(serial)
    while cursor < serial do
      redis.call('zadd', key('returned'), cursor, cursor)
      redis.call('hset', group_key(cursor), 'state', 'admitted', 'released', 'lost by Redis')
      cursor = cursor + 1
    end
    if cursor == serial then cursor = serial + 1 end
    set_final(serial, 'T:' .. step .. ':' .. entry.attempt)
    redis.call('zadd', key('taken'), step, serial)
    local traces = '[]'
    if #entry.traces > 0 then traces = cjson.encode(entry.traces) end
    local replaced = ''
    if #(entry.replaced or {}) > 0 then
      replaced = ',"replaced":' .. cjson.encode(entry.replaced)
    end
    entries[i] = string.format('{"id":"%s","attempt":%d,"digest":"%s","bytes":%d,"traces":%s%s}',
      entry.id, entry.attempt, entry.digest, entry.bytes, traces, replaced)
  end
  local left_out = ''
  if row.left_out then left_out = string.format(',"left_out":%d', row.left_out) end
  redis.call('hset', key('rows'), step, string.format('{"step":%d,"short":%s,"groups":[%s]%s}', step,
    tostring(row.short), table.concat(entries, ','), left_out))
  redis.call('hset', key('meta'), 'journalled', step, 'cursor', cursor)
  redis.call('hdel', key('meta'), 'left_out')
end
local written = journalled - m.journalled
if written > 0 then
  hint('taken')
  answer(written)
end
return written
