-- beat: a member lives. ARGV: 3 member, 4 JSON of its role and info.
-- After: its entry is this one, heard of now; members unheard of for an hour are gone, with their
-- reports; if it breaks a silence of all members, deadlines of leases and claims have moved on by it; if the
-- clock was put back, they and the members' times have moved back with it.
local wrong = called('beat', 4) or label(3, 'member') or object(4, 'role and info')
if wrong then return wrong end
local now = now_ms()
moved_on_after_silence(now)
even_when_full() -- else all would look dead
local back = tonumber(redis.call('get', key('heard')) or now) - now
if back >= SILENCE_MS then
  -- The host's clock was put back: by the times of before, the dead would live, and hold their leases, for as long.
  move_deadlines(-back)
  for _, member in ipairs(redis.call('zrange', key('beats'), 0, -1)) do
    redis.call('zincrby', key('beats'), -back, member)
  end
end
redis.call('set', key('heard'), now)
redis.call('hset', key('members'), ARGV[3], ARGV[4])
redis.call('zadd', key('beats'), now, ARGV[3])
for _, gone in ipairs(redis.call('zrangebyscore', key('beats'), '-inf', now - 3600000)) do
  redis.call('zrem', key('beats'), gone)
  redis.call('hdel', key('members'), gone)
  redis.call('hdel', key('reports'), gone)
end
return 1
