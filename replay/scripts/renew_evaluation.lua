-- renew_evaluation: keeps a claim. ARGV: 3 id, 4 member, 5 ms until it expires.
-- Answer: 1, or 0 where the claim is another's or the evaluation is done.
local wrong = called('renew_evaluation', 5) or label(3, 'id') or label(4, 'member')
  or whole(5, 'milliseconds')
if wrong then return wrong end
local claim = redis.call('hget', key('evaluation_claims'), ARGV[3])
if not claim or string.match(claim, '^%d+ (.*)$') ~= ARGV[4] then return 0 end
even_when_full()
redis.call('hset', key('evaluation_claims'), ARGV[3],
  string.format('%d %s', now_ms() + tonumber(ARGV[5]), ARGV[4]))
return 1
