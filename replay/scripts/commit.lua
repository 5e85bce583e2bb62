-- commit: leased | admitted (expired, not leased again) -> graded, or -> rejected(ungraded).
-- ARGV: 3 serial, 4 attempt, 5 group id, 6 digest, 7 bytes, 8 oldest step ('' = no own token),
-- 9 samples, 10 own verdicts, 11 least and 12 greatest reward ('' = none), 13 JSON of trace ids.
-- Before: payload:<id>:<attempt>:<digest> was put, with a time to live.
-- After: the payload stays; the group is in graded and ages.
-- Answer: "committed", "duplicate", "superseded" or "rejected <why>", all final; or "resend" where
-- the payload isn't there (nothing changed).
local given = first_answer()
if given then return given end
local m, missing = meta('pass_length')
if not m then return missing end
local serial, attempt = tonumber(ARGV[3]), tonumber(ARGV[4])
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
if tonumber(ARGV[10]) < 2 then
  reject(serial, 'ungraded', 0, m.pass_length)
  hint('taken')
  return answer('rejected ungraded: fewer than two own samples have a verdict')
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
  'least', ARGV[11], 'greatest', ARGV[12], 'traces', ARGV[13])
hint('graded')
return answer('committed')
