-- quarantine: taken(n) | trained -> rejected(quarantined, n): the step changed nothing.
-- ARGV: 3 step n, 4 term, 5 reason, 6 step of the newest checkpoint.
-- Before: row n is taken; or it is trained, and the learner has gone back to that checkpoint, which is
-- before it. The caller has the newest term.
-- After: the row stays as it was written, marked; its payloads stay for a person to look at.
-- Answer: how many changed; 0 where it was quarantined before.
local wrong = called('quarantine', 6) or whole(3, 'step') or whole(4, 'term') or text(5, 'reason')
  or whole(6, 'checkpoint')
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
local m, missing = meta('term', 'journalled', 'pass_length')
if not m then return missing end
local step = tonumber(ARGV[3])
local refused = fenced(m.term, ARGV[4])
if refused then return refused end
if step > m.journalled then
  return redis.error_reply('REFUSED step ' .. step .. ' can not be quarantined: only ' ..
    m.journalled .. ' rows are written')
end
local serials = redis.call('zrangebyscore', key('taken'), step, step)
if #serials == 0 then
  if redis.call('hexists', key('quarantined'), step) == 1 then return 0 end
  local row = step > tonumber(ARGV[6]) and redis.call('hget', key('rows'), step)
  if not row then
    return redis.error_reply('REFUSED step ' .. step .. ' can not be quarantined: it is trained, and '
      .. 'a checkpoint has it')
  end
  for i, entry in ipairs(cjson.decode(row).groups) do
    serials[i] = serial_of(entry.id, m.pass_length)
  end
end
redis.call('zremrangebyscore', key('taken'), step, step)
for _, serial in ipairs(serials) do
  local letter, _, attempt = get_final(serial)
  if letter == 'D' then redis.call('setbit', key('trained'), serial, 0) end
  set_final(serial, 'R:' .. step .. ':' .. attempt .. ':quarantined')
  redis.call('setbit', key('rejected:quarantined'), serial, 1)
end
redis.call('hset', key('quarantined'), step, ARGV[5])
answer(#serials)
return #serials
