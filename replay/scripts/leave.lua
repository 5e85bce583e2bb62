-- leave: a member ends in good order. ARGV: 3 member.
-- After: it has no entry. Its last report stays until it is unheard of for an hour: see beat.
local wrong = called('leave', 3) or label(3, 'member')
if wrong then return wrong end
redis.call('hdel', key('members'), ARGV[3])
return 1
