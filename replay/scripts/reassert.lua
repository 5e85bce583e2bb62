-- reassert: rows that stand in the learner's journal and not in Redis are written again.
-- ARGV: 3 term, 4... rows as JSON, ascending by step.
-- Before: the caller has the newest term; each row is one that Redis has as well, or row J + 1.
-- After: J is at least the last row; its groups are taken, whatever Redis thought of them; ids
-- that Redis had not come to yet and that stand in no row are admitted.
-- Answer: how many rows were written. A row that differs from Redis's own is refused.
local given = first_answer()
if given then return tonumber(given) end
local m, missing = meta('term', 'journalled', 'cursor', 'trimmed', 'pass_length')
if not m then return missing end
local refused = fenced(m.term, ARGV[3])
if refused then return refused end
local journalled, cursor, written = m.journalled, m.cursor, 0

local function ids_of(row)
  local ids = {}
  for i, entry in ipairs(row.groups) do
    ids[i] = entry.id .. '/' .. entry.attempt .. '/' .. entry.digest
  end
  return table.concat(ids, ' ')
end

-- What became of the group in Redis since it lost the row.
local function forget(serial, entry)
  for _, set in ipairs({'leased', 'deadlines', 'returned', 'graded', 'ages'}) do
    redis.call('zrem', key(set), serial)
  end
  local known = redis.call('hmget', group_key(serial), 'attempt', 'digest')
  if known[2] and (tonumber(known[1]) ~= entry.attempt or known[2] ~= entry.digest) then
    redis.call('unlink', key('payload:' .. entry.id .. ':' .. known[1] .. ':' .. known[2]))
  end
  redis.call('unlink', group_key(serial))
  local letter, _, _, reason = get_final(serial)
  if letter == 'R' then
    redis.call('setbit', key('rejected:' .. reason), serial, 0)
    redis.call('hdel', key('dead'), serial)
  end
end

for i = 4, #ARGV do
  local row = cjson.decode(ARGV[i])
  local held = redis.call('hget', key('rows'), row.step)
  if row.step <= journalled then
    if held and ids_of(cjson.decode(held)) ~= ids_of(row) then
      return redis.error_reply('REFUSED row ' .. row.step .. ' of the journal is not the one in '
        .. 'Redis: the run folder and this Redis are of different histories')
    end
  elseif row.step > journalled + 1 then
    return redis.error_reply('REFUSED row ' .. row.step .. ' of the journal can not follow row ' ..
      journalled .. ' in Redis: the journal has a gap')
  else
    for _, entry in ipairs(row.groups) do
      local pass, position = string.match(entry.id, '^(%d+)-(%d+)$')
      local serial = tonumber(pass) * m.pass_length + tonumber(position)
      forget(serial, entry)
      while cursor < serial do
        redis.call('zadd', key('returned'), cursor, cursor)
        redis.call('hset', group_key(cursor), 'state', 'admitted', 'released', 'lost by Redis')
        cursor = cursor + 1
      end
      if cursor == serial then cursor = serial + 1 end
      set_final(serial, 'T:' .. row.step .. ':' .. entry.attempt)
      redis.call('zadd', key('taken'), row.step, serial)
    end
    redis.call('hset', key('rows'), row.step, ARGV[i])
    journalled = row.step
    written = written + 1
    redis.call('hset', key('meta'), 'journalled', journalled, 'cursor', cursor)
  end
end
if written > 0 then
  hint('taken')
  answer(written)
end
return written
