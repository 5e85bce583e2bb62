-- reclaim: leased -> admitted, for the leases of a worker's earlier lives.
-- ARGV: 3 worker, 4 holder of the life that goes on.
-- Before: the earlier life is dead (its member id is used anew).
-- After: its leases are admitted again, each with a failed attempt, unless an outage may have ended
-- that life. Answer: their serials.
local wrong = called('reclaim', 4) or label(3, 'worker') or label(4, 'holder')
if wrong then return wrong end
local given = first_answer()
if given then return type(given) == 'string' and cjson.decode(given) or given end
local m, missing = meta('max_attempts', 'pass_length')
if not m then return missing end
local found = {}
for _, serial in ipairs(redis.call('zrange', key('leased'), 0, -1)) do
  local known = redis.call('hmget', group_key(serial), 'worker', 'holder')
  if known[1] == ARGV[3] and known[2] ~= ARGV[4] then found[#found + 1] = serial end
end
if #found > 0 then
  moved_on(now_ms())
  for _, serial in ipairs(found) do
    release(serial, not is_of_outage(serial), 'its worker died', m)
  end
  hint('taken')
  answer(cjson.encode(found))
end
return found
