-- set_state: running | draining | finished | failed. ARGV: 3 the state.
redis.call('hset', key('meta'), 'state', ARGV[3])
hint('state')
hint('taken')
return 1
