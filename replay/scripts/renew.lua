-- renew: moves the deadlines of a worker's leases on by one lease time.
-- ARGV: 3 holder, 4... serials.
-- Before: each is leased by this holder, and within the group's deadline plus one lease time.
-- After: those are renewed (deadlines that moved on before are no excuse any more); one past its cap
-- is released. Answer: serials that are the holder's no more (expired and passed on, revoked, or past
-- the cap): the worker aborts them.
local wrong = called('renew', 3, 65536) or label(3, 'holder')
for i = 4, #ARGV do wrong = wrong or whole(i, 'serial', 0, MOST_SERIAL) end
if wrong then return wrong end
local m, missing = meta('lease_ms', 'max_attempts', 'pass_length')
if not m then return missing end
local holder, now, lost = ARGV[3], now_ms(), {}
local released = false
even_when_full() -- else leases would expire
local i = 4
while i <= #ARGV do
  local serial = ARGV[i]
  local known = redis.call('hmget', group_key(serial), 'state', 'holder', 'cap', 'moved')
  if known[1] ~= 'leased' or known[2] ~= holder then
    lost[#lost + 1] = serial
  else
    -- The grace lets a worker that commits its stragglers at the deadline do so.
    local cap = tonumber(known[3]) + m.lease_ms
    if now >= cap and moved_on(now) then
      -- All of them again: deadlines that were moved on after they were renewed would be too late.
      i, lost = 3, {}
    elseif now >= cap then
      release(serial, true, 'past the group deadline', m)
      released = true
      lost[#lost + 1] = serial
    else
      redis.call('zadd', key('deadlines'), math.min(now + m.lease_ms, cap), serial)
      if known[4] == '1' then redis.call('hset', group_key(serial), 'moved', 0) end
    end
  end
  i = i + 1
end
if released then hint('taken') end
return lost
