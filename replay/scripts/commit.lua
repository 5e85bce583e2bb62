-- commit: leased | admitted (expired, not leased again) -> graded, or -> rejected(ungraded).
-- ARGV: 3 serial, 4 attempt, 5 group id, 6 digest, 7 bytes, 8 oldest step ('' = no own token),
-- 9 samples, 10 own verdicts, 11 least and 12 greatest reward ('' = none), 13 JSON of trace ids,
-- 14 own correct verdicts, 15 JSON of the places of samples with a verdict.
-- Before: payload:<id>:<attempt>:<digest> was put, with a time to live.
-- After: the payload stays; the group is in graded and ages.
-- Answer: "committed", "duplicate", "superseded" or "rejected <why>", all final; or "resend" where
-- the payload isn't there (nothing changed).
local function reward(i, name)
  local value = ARGV[i]
  if value == '' then return nil end
  if value and #value < 33 and string.find(value, '^%-?%d+%.?%d*e?[+-]?%d*$')
      and math.abs(tonumber(value) or math.huge) < math.huge then
    return nil
  end
  return unfit(i, name, 'a finite number or nothing')
end
local wrong = called('commit', 15) or whole(3, 'serial', 0, MOST_SERIAL) or whole(4, 'attempt')
  or label(5, 'group id') or hexadecimal(6, 'digest') or whole(7, 'bytes')
  or (ARGV[8] ~= '' and whole(8, 'oldest step')) or whole(9, 'samples') or whole(10, 'own verdicts')
  or reward(11, 'least reward') or reward(12, 'greatest reward') or labels(13, 'trace ids')
  or whole(14, 'own correct verdicts') or places(15, 'own rows')
if wrong then return wrong end
local given = first_answer()
if given then return given end
local m, missing = meta('pass_length', 'least_verdicts', 'traces_when')
if not m then return missing end
local serial, attempt = tonumber(ARGV[3]), tonumber(ARGV[4])
if ARGV[5] ~= id_of(serial, m.pass_length) then
  return unfit(5, 'group id', 'that of serial ' .. serial .. ': ' .. id_of(serial, m.pass_length))
end
if tonumber(ARGV[10]) > tonumber(ARGV[9]) then
  return unfit(10, 'own verdicts', 'at most the ' .. ARGV[9] .. ' samples')
end
if tonumber(ARGV[14]) > tonumber(ARGV[9]) then
  return unfit(14, 'own correct verdicts', 'at most the ' .. ARGV[9] .. ' samples')
end
local own_rows = cjson.decode(ARGV[15])
if #own_rows ~= tonumber(ARGV[10]) or (own_rows[#own_rows] or -1) >= tonumber(ARGV[9]) then
  return unfit(15, 'own rows', ARGV[10] .. ' places of ' .. ARGV[9] .. ' samples')
end
local name = group_key(serial)
local known = redis.call('hmget', name, 'state', 'attempt')
if not known[1] then
  local letter, step, finished, reason = get_final(serial)
  if not letter then return 'rejected unknown: this group was never leased' end
  if letter == 'R' then return 'rejected ' .. reason end
  if finished == attempt then return 'duplicate' end
  return 'superseded'
end
if tonumber(known[2]) ~= attempt then return 'superseded' end
if known[1] == 'graded' then return 'duplicate' end
local least = m.least_verdicts or 2 -- of a run that was created before this was a setting
if tonumber(ARGV[10]) < least then
  reject(serial, 'ungraded', 0, m.pass_length)
  hint('taken')
  return answer('rejected ungraded: ' .. ARGV[10] .. ' of its own samples have a verdict, and the '
    .. 'objective needs ' .. least)
end
local payload = key('payload:' .. ARGV[5] .. ':' .. attempt .. ':' .. ARGV[6])
if redis.call('exists', payload) == 0 then return 'resend' end
local place = redis.call('zscore', key('leased'), serial)
  or redis.call('zscore', key('returned'), serial) or serial
redis.call('zrem', key('leased'), serial)
redis.call('zrem', key('deadlines'), serial)
redis.call('zrem', key('returned'), serial)
redis.call('persist', payload)
redis.call('zadd', key('graded'), place, serial)
if ARGV[8] ~= '' then redis.call('zadd', key('ages'), ARGV[8], serial) end
redis.call('hset', name, 'state', 'graded', 'digest', ARGV[6], 'bytes', ARGV[7], 'samples', ARGV[9],
  'least', ARGV[11], 'greatest', ARGV[12], 'traces', ARGV[13], 'correct', ARGV[14])
-- Long lists make a hash large, and only the draw of who gives way asks for this one.
if m.traces_when == 'all_failed' then redis.call('hset', name, 'own_rows', ARGV[15]) end
hint('graded')
return answer('committed')
