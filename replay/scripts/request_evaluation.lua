-- request_evaluation: asks for one. ARGV: 3 id, 4 step, 5 JSON of the request.
-- After: it is open, unless it was asked for before. Answer: 1 if it is new.
if redis.call('hsetnx', key('evaluations'), ARGV[3], ARGV[5]) == 0 then return 0 end
redis.call('zadd', key('evaluations_open'), ARGV[4], ARGV[3])
hint('taken')
return 1
