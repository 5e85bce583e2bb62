-- renew_evaluation: keeps a claim. ARGV: 3 id, 4 member, 5 ms until it expires.
-- Answer: 1, or 0 where the claim is another's or the evaluation is done.
local claim = redis.call('hget', key('evaluation_claims'), ARGV[3])
if not claim or string.match(claim, '^%d+ (.*)$') ~= ARGV[4] then return 0 end
redis.call('hset', key('evaluation_claims'), ARGV[3],
  string.format('%d %s', now_ms() + tonumber(ARGV[5]), ARGV[4]))
return 1
