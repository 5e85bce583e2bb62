-- request_evaluation: asks for one. ARGV: 3 id, 4 step, 5 JSON of the request.
-- After: it is open, unless it was asked for before or is done. Answer: 1 if it is new.
local wrong = called('request_evaluation', 5) or label(3, 'id') or whole(4, 'step')
  or object(5, 'request')
if wrong then return wrong end
if redis.call('hexists', key('evaluation_results'), ARGV[3]) == 1 then return 0 end
if redis.call('hsetnx', key('evaluations'), ARGV[3], ARGV[5]) == 0 then return 0 end
redis.call('zadd', key('evaluations_open'), ARGV[4], ARGV[3])
hint('taken')
return 1
