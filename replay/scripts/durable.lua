-- durable: lets go of rows and payloads up to the oldest checkpoint kept, some at a time.
-- ARGV: 3 step of that checkpoint, 4 term, 5 most groups for one call.
-- Before: steps up to it are trained or quarantined; the caller has the newest term.
-- After: trimmed has moved on; quarantined rows keep their payloads.
-- Answer: the last row that was let go; the caller calls again until it is the step.
local wrong = called('durable', 5) or whole(3, 'step') or whole(4, 'term')
  or whole(5, 'most groups', 1)
if wrong then return wrong end
local m, missing = meta('term', 'journalled', 'trimmed')
if not m then return missing end
local step, budget = tonumber(ARGV[3]), tonumber(ARGV[5])
local refused = fenced(m.term, ARGV[4])
if refused then return refused end
if step > m.journalled then
  return redis.error_reply('REFUSED a checkpoint of step ' .. step .. ' can not be: only ' ..
    m.journalled .. ' rows are written')
end
local open = redis.call('zrangebyscore', key('taken'), '-inf', step, 'limit', 0, 1)
if #open > 0 then
  local at = redis.call('zscore', key('taken'), open[1])
  return redis.error_reply('REFUSED a checkpoint of step ' .. step .. ' is not durable while step '
    .. at .. ' is not confirmed')
end
even_when_full() -- it moves on over rows without payloads too
local trimmed = m.trimmed
while trimmed < step and budget > 0 do
  local number = trimmed + 1
  local row = redis.call('hget', key('rows'), number)
  if row and redis.call('hexists', key('quarantined'), number) == 0 then
    for _, entry in ipairs(cjson.decode(row).groups) do
      redis.call('unlink', key('payload:' .. entry.id .. ':' .. entry.attempt .. ':'
        .. entry.digest))
      budget = budget - 1
    end
    redis.call('hdel', key('rows'), number)
  end
  trimmed = number
  budget = budget - 1
end
if trimmed > m.trimmed then redis.call('hset', key('meta'), 'trimmed', trimmed) end
return trimmed
