-- live: members heard of lately. ARGV: 3 within so many ms.
-- Answer: member, JSON and age in ms of each, in a row.
local wrong = called('live', 3) or whole(3, 'milliseconds')
if wrong then return wrong end
local now, found = now_ms(), {}
local beats = redis.call('zrangebyscore', key('beats'), now - tonumber(ARGV[3]), '+inf', 'withscores')
for i = 1, #beats, 2 do
  local text = redis.call('hget', key('members'), beats[i])
  if text then
    found[#found + 1] = beats[i]
    found[#found + 1] = text
    found[#found + 1] = now - tonumber(beats[i + 1])
  end
end
return found
