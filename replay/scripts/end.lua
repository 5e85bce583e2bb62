-- end: leased | admitted | graded -> rejected(run_ended): the run takes no more rows.
-- ARGV: 3 reason.
-- After: ended is set; only taken and final groups are left. Answer: how many were rejected.
local wrong = called('end', 3) or text(3, 'reason')
if wrong then return wrong end
local m, missing = meta('pass_length', 'journalled')
if not m then return missing end
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
return rejected
