-- give_back_evaluation: claimed -> due, by the worker that has claimed it; after its last failure
-- -> given up. ARGV: 3 id, 4 member, 5 reason, 6 "1" if the attempt counts as failed, 7 failures
-- after which it is given up, 8 ms by which a failed one waits for its next claim.
-- Before: the claim is this member's. After: anybody may claim it, or it is open no more and its
-- failures are kept. Answer: 1, 2 where it was given up, 0 where the claim isn't this member's.
local wrong = called('give_back_evaluation', 8) or label(3, 'id') or label(4, 'member')
  or text(5, 'reason') or one_of(6, 'failed', '0', '1') or whole(7, 'failures', 1)
  or whole(8, 'milliseconds')
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
if claim_of(ARGV[3]) ~= ARGV[4] then return 0 end
redis.call('hdel', key('evaluation_claims'), ARGV[3])
local said = 1
if ARGV[6] == '1' then
  local before = redis.call('hget', key('evaluation_failures'), ARGV[3]) or '0'
  local failures = tonumber(string.match(before, '^%d+')) + 1
  redis.call('hset', key('evaluation_failures'), ARGV[3], failures .. ' ' .. ARGV[5])
  if failures >= tonumber(ARGV[7]) then
    redis.call('zrem', key('evaluations_open'), ARGV[3])
    hint('state')
    said = 2
  else
    set_claim(ARGV[3], '(failed)', now_ms() + tonumber(ARGV[8]))
  end
end
hint('taken')
return tonumber(answer(tostring(said)))
