-- lease: admitted -> leased, for up to so many groups.
-- ARGV: 3 worker, 4 holder (worker and its life), 5 term and 6 step of the version that it holds,
-- 7 count, 8 used memory, 9 maxmemory (0 = none), both in bytes and about a second old.
-- Before: the run is running and not offline; J + floor(r/B) - w <= eta for each group; leases < max_inflight.
-- After: each is in leased and deadlines with a new attempt; returned ones went before new ones.
-- Answer: JSON {leases: [[serial, attempt, deadline ms], ...], wait, state, journalled, now}.
local wrong = called('lease', 9) or label(3, 'worker') or label(4, 'holder') or whole(5, 'term')
  or whole(6, 'step') or whole(7, 'count', 0, 65536) or whole(8, 'used memory')
  or whole(9, 'maxmemory')
if wrong then return wrong end
local given = first_answer()
if given then return given end
local m, missing = meta('state', 'ended', 'journalled', 'cursor', 'groups_per_step',
  'max_staleness', 'lease_ms', 'group_deadline_ms', 'max_inflight', 'max_attempts', 'steps',
  'total_groups', 'pass_length', 'group_bytes', 'offline')
if not m then return missing end
local worker, holder = ARGV[3], ARGV[4]
local term, held, count = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local used, most = tonumber(ARGV[8]), tonumber(ARGV[9])
local now = now_ms()
local leases, places, deadlines, wait = {}, {}, {}, ''
local changed = false

if m.ended then
  wait = 'run ended'
elseif m.state ~= 'running' then
  wait = 'run is ' .. m.state
elseif m.offline == 1 then
  wait = 'ledger: training is offline'
else
  changed = expire_due(now, m) > 0
  local leased = redis.call('zcard', key('leased'))
  local graded = redis.call('zcard', key('graded'))
  local returned = redis.call('zcard', key('returned'))
  local deadline = now + m.lease_ms
  local cap = now + m.group_deadline_ms
  local cursor = m.cursor
  while #leases < count do
    if leased >= m.max_inflight then
      wait = 'admission: inflight'
      break
    end
    if most > 0 and used + (leased + 1) * m.group_bytes > 0.75 * most then
      wait = 'admission: memory'
      break
    end
    local serial, place, rank
    local back = returned > 0
    if back then
      local first = redis.call('zrange', key('returned'), 0, 0, 'withscores')
      serial, place = tonumber(first[1]), first[2]
      local below = '(' .. place
      -- What this call has leased so far came back too, at lower places.
      rank = redis.call('zcount', key('leased'), '-inf', below) + #leases
        + redis.call('zcount', key('graded'), '-inf', below)
    else
      serial, place = cursor, cursor
      rank = leased + graded
      if m.total_groups > 0 and serial >= m.total_groups then
        wait = 'admission: every group of the run is leased'
        break
      end
    end
    local steps_before = m.journalled + math.floor(rank / m.groups_per_step)
    if m.steps > 0 and steps_before >= m.steps then
      wait = 'admission: the last step has its groups'
      break
    end
    if steps_before - held > m.max_staleness then
      wait = 'admission: staleness'
      break
    end
    if back then
      redis.call('zrem', key('returned'), serial)
      returned = returned - 1
    else
      cursor = cursor + 1
    end
    local name = group_key(serial)
    local attempt = redis.call('hincrby', name, 'attempt', 1)
    redis.call('hset', name, 'state', 'leased', 'worker', worker, 'holder', holder, 'term', term,
      'step', held, 'leased_ms', now, 'cap', cap, 'moved', 0)
    leased = leased + 1
    leases[#leases + 1] = {serial, attempt, cap}
    places[2 * #leases - 1], places[2 * #leases] = place, serial
    deadlines[2 * #leases - 1], deadlines[2 * #leases] = deadline, serial
  end
  many(places, 'zadd', key('leased'))
  many(deadlines, 'zadd', key('deadlines'))
  if cursor > m.cursor then redis.call('hset', key('meta'), 'cursor', cursor) end
end

local reply = cjson.encode({leases = leases, wait = wait, state = m.state,
  journalled = m.journalled, now = now, lease_ms = m.lease_ms})
-- A repeat of a call that changed nothing may as well look again.
if changed or #leases > 0 then return answer(reply) end
return reply
