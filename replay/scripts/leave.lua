-- leave: a member ends in good order. ARGV: 3 member.
local wrong = called('leave', 3) or label(3, 'member')
if wrong then return wrong end
redis.call('zrem', key('beats'), ARGV[3])
redis.call('hdel', key('members'), ARGV[3])
return 1
