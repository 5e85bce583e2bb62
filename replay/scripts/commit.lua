-- commit: leased | admitted (expired, not leased again) -> graded, or -> rejected(ungraded), of each
-- of some groups.
-- ARGV, thirteen for each group: serial, attempt, digest, bytes, oldest step ('' = no own token),
-- samples, least and greatest reward and the sum of all rewards ('' = none), JSON of trace ids, own
-- correct verdicts, JSON of the places of samples with a verdict, payload ('' = it was put before
-- this call, with a time to live).
-- After: the payload stays; the group is in graded and ages.
-- Answer: '{"words": [...]}', one for each group: "committed", "duplicate", "superseded" or
-- "rejected <why>", all final; or "resend" where the payload isn't there (the group hasn't changed).
local FIELDS, MOST_GROUPS = 13, 64
local function reward(i, name)
  if ARGV[i] and is_reward(ARGV[i]) then return nil end
  return unfit(i, name, 'a finite number or nothing')
end
local wrong = called('commit', 2 + FIELDS, 2 + FIELDS * MOST_GROUPS)
if wrong then return wrong end
if (#ARGV - 2) % FIELDS ~= 0 then
  return refuse(#ARGV .. ' arguments, not 2 and ' .. FIELDS .. ' for each group: nothing was changed')
end
local groups = {}
for at = 3, #ARGV, FIELDS do
  wrong = whole(at, 'serial', 0, MOST_SERIAL) or whole(at + 1, 'attempt')
    or hexadecimal(at + 2, 'digest') or whole(at + 3, 'bytes')
    or (ARGV[at + 4] ~= '' and whole(at + 4, 'oldest step')) or whole(at + 5, 'samples')
    or reward(at + 6, 'least reward') or reward(at + 7, 'greatest reward')
    or reward(at + 8, 'sum of rewards') or labels(at + 9, 'trace ids')
  if wrong then return wrong end
  local samples = tonumber(ARGV[at + 5])
  wrong = whole(at + 10, 'own correct verdicts', 0, samples)
  if wrong then return wrong end
  local own_rows = decoded(ARGV[at + 11], '[')
  if not are_places(own_rows) or (own_rows[#own_rows] or -1) >= samples then
    return unfit(at + 11, 'own rows', 'a JSON list of places of ' .. samples .. ' samples, ascending')
  end
  groups[#groups + 1] = {
    serial = tonumber(ARGV[at]), attempt = tonumber(ARGV[at + 1]), digest = ARGV[at + 2],
    bytes = ARGV[at + 3], oldest = ARGV[at + 4], samples = ARGV[at + 5], least = ARGV[at + 6],
    greatest = ARGV[at + 7], total = ARGV[at + 8], traces = ARGV[at + 9], correct = ARGV[at + 10],
    own_rows = ARGV[at + 11], payload = ARGV[at + 12], verdicts = #own_rows,
  }
end
local given = first_answer()
if given then return given end
local m, missing = meta('pass_length', 'least_verdicts', 'traces_when')
if not m then return missing end
local least_verdicts = m.least_verdicts or 2 -- of a run that was created before this was a setting

local serials, places, ages = {}, {}, {} -- of what is committed

-- The group's answer, and the hint that is due if it has changed.
local function commit(group)
  local serial, attempt = group.serial, group.attempt
  local name = group_key(serial)
  local known = redis.call('hmget', name, 'state', 'attempt')
  if not known[1] then
    local letter, step, finished, reason = get_final(serial)
    if not letter then return 'rejected unknown: this group was never leased' end
    if letter == 'R' then return 'rejected ' .. reason end
    if finished == attempt then return 'duplicate' end
    return 'superseded'
  end
  if tonumber(known[2]) ~= attempt then return 'superseded' end
  if known[1] == 'graded' then return 'duplicate' end
  if group.verdicts < least_verdicts then
    reject(serial, 'ungraded', 0, m.pass_length)
    return 'rejected ungraded: ' .. group.verdicts .. ' of its own samples have a verdict, and the '
      .. 'objective needs ' .. least_verdicts, 'taken'
  end
  local payload = key('payload:' .. id_of(serial, m.pass_length) .. ':' .. attempt .. ':'
    .. group.digest)
  if group.payload ~= '' then
    redis.call('set', payload, group.payload) -- before all other writes: a full Redis refuses it
  elseif redis.call('exists', payload) == 1 then
    redis.call('persist', payload)
  else
    return 'resend'
  end
  local place = redis.call('zscore', key('leased'), serial)
  if not place then
    place = redis.call('zscore', key('returned'), serial) or serial
    redis.call('zrem', key('returned'), serial)
  end
  serials[#serials + 1] = serial
  places[#places + 1] = place
  places[#places + 1] = serial
  if group.oldest ~= '' then
    ages[#ages + 1] = group.oldest
    ages[#ages + 1] = serial
  end
  redis.call('hset', name, 'state', 'graded', 'digest', group.digest, 'bytes', group.bytes,
    'samples', group.samples, 'least', group.least, 'greatest', group.greatest,
    'total', group.total, 'rewards', group.verdicts, 'traces', group.traces,
    'correct', group.correct)
  -- Long lists make a hash large, and only the draw of who gives way asks for this one.
  if m.traces_when == 'all_failed' then redis.call('hset', name, 'own_rows', group.own_rows) end
  return 'committed', 'graded'
end

local words, hints = {}, {}
for i, group in ipairs(groups) do
  local word, channel = commit(group)
  words[i] = word
  if channel then hints[channel] = true end
end
many(serials, 'zrem', key('leased'))
many(serials, 'zrem', key('deadlines'))
many(places, 'zadd', key('graded'))
many(ages, 'zadd', key('ages'))
for channel in pairs(hints) do hint(channel) end
local told = cjson.encode({words = words})
-- A repeat of a call that changed nothing may as well look again.
if next(hints) then return answer(told) end
return told
