-- set_state: running | draining | finished | failed. ARGV: 3 the state.
if first_answer() then return 1 end
redis.call('hset', key('meta'), 'state', ARGV[3])
hint('state')
hint('taken')
answer('1')
return 1
