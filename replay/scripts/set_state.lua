-- set_state: running | draining | finished | failed. ARGV: 3 the state.
local wrong = called('set_state', 3) or one_of(3, 'state', 'running', 'draining', 'finished', 'failed')
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
even_when_full()
redis.call('hset', key('meta'), 'state', ARGV[3])
hint('state')
hint('taken')
answer('1')
return 1
