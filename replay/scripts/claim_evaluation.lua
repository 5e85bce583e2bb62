-- claim_evaluation: gives a worker the earliest open one that its weights are new enough for.
-- ARGV: 3 member, 4 step that it holds, 5 ms until the claim expires.
-- Before: nobody else's claim on it is alive. Answer: JSON of the request, or nil.
local wrong = called('claim_evaluation', 5) or label(3, 'member') or whole(4, 'step')
  or whole(5, 'milliseconds')
if wrong then return wrong end
local now = now_ms()
local due = redis.call('zrangebyscore', key('evaluations_open'), '-inf', ARGV[4])
for _, id in ipairs(due) do
  local claim = redis.call('hget', key('evaluation_claims'), id)
  local expires, member = 0, nil
  if claim then expires, member = string.match(claim, '^(%d+) (.*)$') end
  if not claim or member == ARGV[3] or tonumber(expires) <= now then
    even_when_full() -- an evaluation takes no room, and its worker would wait for some
    redis.call('hset', key('evaluation_claims'), id,
      string.format('%d %s', now + tonumber(ARGV[5]), ARGV[3]))
    return redis.call('hget', key('evaluations'), id)
  end
end
return nil
