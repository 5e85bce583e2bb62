-- leave: a member ends in good order. ARGV: 3 member.
redis.call('zrem', key('beats'), ARGV[3])
redis.call('hdel', key('members'), ARGV[3])
return 1
