-- confirm: taken(n) -> trained.
-- ARGV: 3 step n, 4 term.
-- Before: row n is written and the caller has the newest term. After: its groups are trained.
-- Answer: how many changed; 0 where it was confirmed or quarantined before.
local wrong = called('confirm', 4) or whole(3, 'step') or whole(4, 'term')
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
local m, missing = meta('term', 'journalled')
if not m then return missing end
local step = tonumber(ARGV[3])
local refused = fenced(m.term, ARGV[4])
if refused then return refused end
if step > m.journalled then
  return redis.error_reply('REFUSED step ' .. step .. ' can not be confirmed: only ' ..
    m.journalled .. ' rows are written')
end
local serials = redis.call('zrangebyscore', key('taken'), step, step)
if #serials == 0 then return 0 end
redis.call('zremrangebyscore', key('taken'), step, step)
local finals = {}
for i, serial in ipairs(serials) do
  local _, _, attempt = get_final(serial)
  finals[i] = {serial, 'D:' .. step .. ':' .. attempt}
  redis.call('setbit', key('trained'), serial, 1)
end
set_finals(finals)
answer(#serials)
return #serials
