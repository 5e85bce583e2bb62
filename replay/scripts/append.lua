-- append: adds an entry to a list of things that happened, once.
-- ARGV: 3 list, 4 entry, 5 most entries kept. Answer: 1.
local KEPT = {meta = 1, leased = 1, deadlines = 1, returned = 1, graded = 1, ages = 1, taken = 1,
  trained = 1, rows = 1, quarantined = 1, server = 1, heard = 1, dead = 1, members = 1, beats = 1,
  evaluations = 1, evaluations_open = 1, evaluation_claims = 1, evaluation_results = 1,
  problems = 1, traces = 1, reports = 1, config = 1, curve_client = 1, eval_sets = 1,
  callback_requests = 1, callback_served = 1, callback_stopped = 1, meeting = 1}
local function listed(i)
  local name = ARGV[i]
  if name and #name < 65 and string.find(name, '^[a-z_]+$') and not KEPT[name] then return nil end
  return unfit(i, 'list', 'the name of a list: small letters, and no name of another key')
end
local wrong = called('append', 5) or listed(3) or text(4, 'entry', 1)
  or whole(5, 'most entries', 1)
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
even_when_full() -- else a pool would end of a restarted grader
redis.call('rpush', key(ARGV[3]), ARGV[4])
redis.call('ltrim', key(ARGV[3]), -tonumber(ARGV[5]), -1)
answer('1')
return 1
