-- request_evaluation: asks for one. ARGV: 3 id, 4 step, 5 JSON of the request, 6 term.
-- Before: the caller has the newest term.
-- After: it is due or done, and the first request of this id stands. One that had been given up is
-- due again, without its failures. Answer: 1 if it is due now and wasn't before.
local wrong = called('request_evaluation', 6) or label(3, 'id') or whole(4, 'step')
  or object(5, 'request') or whole(6, 'term')
if wrong then return wrong end
local refused = fenced(tonumber(redis.call('hget', key('meta'), 'term') or ARGV[6]), ARGV[6])
if refused then return refused end
if redis.call('hexists', key('evaluation_results'), ARGV[3]) == 1 then return 0 end
if redis.call('zscore', key('evaluations_open'), ARGV[3]) then return 0 end
redis.call('hdel', key('evaluation_failures'), ARGV[3])
redis.call('hsetnx', key('evaluations'), ARGV[3], ARGV[5])
redis.call('zadd', key('evaluations_open'), ARGV[4], ARGV[3])
hint('taken')
return 1
