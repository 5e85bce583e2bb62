-- put: a small value that processes need to start, to end or to be seen, and so one that a full Redis takes too.
-- ARGV: 3 key, 4 value, 5 field where the key is a hash, else ''.
-- After: the value stands there, in the place of an earlier one. Answer: 1.
local MOST_BYTES = 16777216
local wrong = called('put', 5) or one_of(3, 'key', 'config', 'reports', 'meeting', 'callback_requests',
  'callback_served', 'callback_stopped')
if wrong then return wrong end
local hash = ARGV[3] == 'reports'
if hash then wrong = label(5, 'field') else wrong = one_of(5, 'field', '') end
if wrong then return wrong end
if #ARGV[4] < 1 or #ARGV[4] > MOST_BYTES or not is_utf8(ARGV[4]) then
  return unfit(4, 'value', 'UTF-8 text of 1 to ' .. MOST_BYTES .. ' bytes')
end
even_when_full()
if hash then
  redis.call('hset', key(ARGV[3]), ARGV[5], ARGV[4])
else
  redis.call('set', key(ARGV[3]), ARGV[4])
end
return 1
