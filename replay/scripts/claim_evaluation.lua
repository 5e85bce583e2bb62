-- claim_evaluation: gives a worker the earliest open one that its weights are new enough for.
-- ARGV: 3 member, 4 step that it holds, 5 ms until the claim expires.
-- Before: nobody else's claim on it is alive, nor may an outage have ended it. Answer: JSON of the request, or nil.
local wrong = called('claim_evaluation', 5) or label(3, 'member') or whole(4, 'step')
  or whole(5, 'milliseconds')
if wrong then return wrong end
local now = now_ms()
local due = redis.call('zrangebyscore', key('evaluations_open'), '-inf', ARGV[4])
for _, id in ipairs(due) do
  local member, expires = claim_of(id)
  -- In an outage its worker couldn't renew it.
  if member and member ~= ARGV[3] and expires <= now and moved_on(now) then
    member, expires = claim_of(id)
  end
  if not member or member == ARGV[3] or expires <= now then
    even_when_full() -- an evaluation takes no room, and its worker would wait for some
    set_claim(id, ARGV[3], now + tonumber(ARGV[5]))
    return redis.call('hget', key('evaluations'), id)
  end
end
return nil
