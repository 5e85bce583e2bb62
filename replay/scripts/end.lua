-- end: leased | admitted | graded -> rejected(run_ended): the run takes no more rows.
-- ARGV: 3 reason, 4 term.
-- Before: the caller has the newest term.
-- After: ended is set; only taken and final groups are left. Answer: how many were rejected.
local wrong = called('end', 4) or text(3, 'reason') or whole(4, 'term')
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
local m, missing = meta('term', 'pass_length', 'journalled')
if not m then return missing end
local refused = fenced(m.term, ARGV[4])
if refused then return refused end
local rejected = 0
for _, set in ipairs({'leased', 'returned', 'graded'}) do
  for _, serial in ipairs(redis.call('zrange', key(set), 0, -1)) do
    reject(tonumber(serial), 'run_ended', m.journalled, m.pass_length)
    rejected = rejected + 1
  end
end
even_when_full()
redis.call('hset', key('meta'), 'ended', ARGV[3])
hint('taken')
hint('state')
answer(rejected)
return rejected
