-- finish_evaluation: stores a result; the first one stands. ARGV: 3 id, 4 JSON of the result.
-- After: it is open no more. Of a job that was forgotten meanwhile nothing is kept.
-- Answer: 1 if this result stands.
local wrong = called('finish_evaluation', 4) or label(3, 'id') or object(4, 'result')
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
if redis.call('hexists', key('evaluations'), ARGV[3]) == 0 then
  redis.call('hdel', key('evaluation_samples'), ARGV[3])
  return tonumber(answer('0'))
end
even_when_full() -- else what was measured would be thrown away
local first = redis.call('hsetnx', key('evaluation_results'), ARGV[3], ARGV[4])
redis.call('zrem', key('evaluations_open'), ARGV[3])
redis.call('hdel', key('evaluation_claims'), ARGV[3])
redis.call('hdel', key('evaluation_failures'), ARGV[3])
hint('state')
answer(first)
return first
