-- create: writes the run's settings; refuses other values for frozen ones.
-- ARGV: 3 JSON of frozen fields {name: text}, 4 JSON of changeable fields.
-- After: meta holds both. Answer: JSON {"created": bool, "differ": {name: held text}}; where
-- "differ" isn't empty, nothing was written.
local given = first_answer()
if given then return given end
local frozen, changeable = cjson.decode(ARGV[3]), cjson.decode(ARGV[4])
local name = key('meta')
local created = redis.call('hget', name, 'created') == false
if created then
  redis.call('hset', name, 'created', now_ms(), 'term', 0, 'journalled', 0, 'cursor', 0,
    'trimmed', 0)
  redis.call('hsetnx', name, 'state', 'running')
  redis.call('set', key('server'), server_life()) -- else the first lease to expire had two lives
  for field, value in pairs(frozen) do redis.call('hset', name, field, value) end
else
  local differ, any = {}, false
  for field, value in pairs(frozen) do
    local held = redis.call('hget', name, field)
    if held ~= value then
      differ[field] = held or ''
      any = true
    end
  end
  if any then return answer(cjson.encode({created = false, differ = differ})) end
end
for field, value in pairs(changeable) do redis.call('hset', name, field, value) end
-- A run that ended at its last step goes on where it now has more of them.
local now = redis.call('hmget', name, 'ended', 'journalled', 'steps', 'total_groups', 'cursor')
if now[1] then
  local steps, groups = tonumber(now[3]), tonumber(now[4])
  if (steps > 0 and steps > tonumber(now[2])) or (groups > 0 and groups > tonumber(now[5])) then
    redis.call('hdel', name, 'ended')
  end
end
hint('taken')
return answer(cjson.encode({created = created, differ = {}}))
