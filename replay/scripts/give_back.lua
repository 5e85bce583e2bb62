-- give_back: leased -> admitted, by the worker that holds it.
-- ARGV: 3 holder, 4 serial, 5 attempt, 6 reason, 7 "1" if the attempt counts as failed.
-- Before: leased by this holder with this attempt. After: admitted again (rejected after its last
-- attempt). Answer: 1, or 0 where the lease was no longer the holder's.
local wrong = called('give_back', 7) or label(3, 'holder') or whole(4, 'serial', 0, MOST_SERIAL)
  or whole(5, 'attempt') or text(6, 'reason') or one_of(7, 'failed', '0', '1')
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
local m, missing = meta('max_attempts', 'pass_length')
if not m then return missing end
local serial = tonumber(ARGV[4])
local known = redis.call('hmget', group_key(serial), 'state', 'holder', 'attempt')
if known[1] ~= 'leased' or known[2] ~= ARGV[3] or known[3] ~= ARGV[5] then return 0 end
release(serial, ARGV[7] == '1', ARGV[6], m)
hint('taken')
answer('1')
return 1
