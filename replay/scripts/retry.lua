-- retry: rejected(attempts) -> admitted: a person puts dead letters back.
-- ARGV: 3... serials.
-- Before: the run will cut more rows.
-- After: each that was one is returned, behind all that is on its way, so that nobody's rank
-- changes; its failures are forgotten, and commits of its earlier attempts are superseded. Of the
-- others nothing changes.
-- Answer: JSON {back: [serials]}, or {over: why no row will take them}.
local wrong = called('retry', 3, 65536)
for i = 3, #ARGV do wrong = wrong or whole(i, 'serial', 0, MOST_SERIAL) end
if wrong then return wrong end
local given = first_answer()
if given then return given end
local m, missing = meta('cursor', 'journalled', 'steps', 'total_groups', 'ended')
if not m then return missing end

local over = m.ended
if not over and m.steps > 0 and m.journalled >= m.steps then
  over = 'its last row, ' .. m.journalled .. ', is written'
elseif not over and m.journalled > 0 then
  local last = redis.call('hget', key('rows'), m.journalled)
  if last and cjson.decode(last).short then
    -- Unless the run has been given more passes since.
    local more = m.cursor < m.total_groups
    for _, set in ipairs({'leased', 'returned', 'graded'}) do
      more = more or redis.call('zcard', key(set)) > 0
    end
    if not more then over = 'its last row, ' .. m.journalled .. ', is written' end
  end
end
if over then return answer(cjson.encode({over = over})) end

local last = m.cursor - 1
for _, set in ipairs({'leased', 'returned', 'graded'}) do
  local top = redis.call('zrevrange', key(set), 0, 0, 'withscores')
  last = math.max(last, tonumber(top[2] or last))
end
local back = {}
for i = 3, #ARGV do
  local serial = tonumber(ARGV[i])
  if redis.call('hexists', key('dead'), serial) == 1 then
    local attempt = forget_rejection(serial)
    -- The next lease has yet another number.
    redis.call('hset', group_key(serial), 'state', 'admitted', 'attempt', attempt + 1,
      'released', 'put back by `tandem retry`')
    last = last + PLACE
    redis.call('zadd', key('returned'), last, serial)
    back[#back + 1] = serial
  end
end
if #back == 0 then return answer('{"back":[]}') end
hint('taken')
return answer(cjson.encode({back = back}))
