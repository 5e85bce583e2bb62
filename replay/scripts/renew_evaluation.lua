-- renew_evaluation: keeps a claim. ARGV: 3 id, 4 member, 5 ms until it expires.
-- Answer: 1, or 0 where the claim is another's or the evaluation is done.
local wrong = called('renew_evaluation', 5) or label(3, 'id') or label(4, 'member')
  or whole(5, 'milliseconds')
if wrong then return wrong end
if claim_of(ARGV[3]) ~= ARGV[4] then return 0 end
even_when_full()
set_claim(ARGV[3], ARGV[4], now_ms() + tonumber(ARGV[5]))
return 1
