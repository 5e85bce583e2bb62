-- waiting: whom the next row waits for, without changing anything.
-- Answer: JSON {group_id, state, worker, reason, journalled, graded, leased, returned, run_state}.
local wrong = called('waiting', 2)
if wrong then return wrong end
local m, missing = meta('journalled', 'cursor', 'pass_length', 'state')
if not m then return missing end
local waited = waited_for(m)
waited.journalled = m.journalled
waited.run_state = m.state
for _, set in ipairs({'graded', 'leased', 'returned'}) do
  waited[set] = redis.call('zcard', key(set))
end
return cjson.encode(waited)
