-- What every script begins with: names of keys, time, answers given before, and the moves of a
-- group between sets that more than one transition makes.
--
-- Keys of a run (prefix "tandem:<run id>:"), where a serial is a position counted over passes, and a
-- place is what groups are ordered by: the serial, or, of one that was put back (retry), a number
-- between two serials:
--   meta              hash    settings; term, journalled (number of the last row), cursor (the
--                             first serial never leased), trimmed (last row whose payloads went),
--                             left_out (groups without a signal since the last row, if any)
--   leased            zset    serial -> place
--   deadlines         zset    serial -> ms, of the same members as leased
--   returned          zset    serial -> place: admitted again after a lease
--   graded            zset    serial -> place
--   ages              zset    serial -> step of its oldest own token, of graded groups that have one
--   taken             zset    serial -> step, until trained
--   group:<serial>    hash    of a live group (leased, returned, graded) only
--   final:<s // 256>  hash    s % 256 -> T|D|R:<step>:<attempt>[:<reason>]: taken, trained, rejected
--   trained, rejected:<reason>  bitmaps over serials: sets of which only the size is asked
--   rows              hash    step -> row, as written
--   quarantined       hash    step -> reason
--   payload:<id>:<attempt>:<digest>  string, put by the client beside the script
--   server            string  INFO's run_id of the server's life that last judged deadlines
--   heard             string  ms at which some member was last heard of
--   trace_rewards     hash    trace id -> reward, of those that have one
--   dead              hash    serial -> what is to be told of a group given up for its failures
--   evaluations       hash    id -> request; due while in evaluations_open, done once it is in
--                             evaluation_results, given up where it is in neither
--   evaluations_open  zset    id -> step from which on a worker's weights are new enough
--   evaluation_claims hash    id -> <ms at which the claim expires> <member>
--   evaluation_failures  hash id -> <failed attempts> <why the last one failed>
--   evaluation_results   hash id -> result; the first one stands
--   evaluation_samples   hash id -> samples of a job that no run has asked for, until they are taken
--   answers:<caller>  hash    request number % 64 -> that number, name of the script and its answer
-- Sizes are read from these sets; nothing is counted beside them.
--
-- ARGV[1] is the caller, ARGV[2] its request number.

-- Called without keys it does nothing: so the client loads it. (SCRIPT LOAD would write it to the
-- append-only file of Redis 6.2, and a restarted server would know it.)
if #KEYS == 0 then return 'loaded' end

local prefix, caller, request = KEYS[1], ARGV[1], tonumber(ARGV[2])
local ANSWERS_KEPT = 64 -- a batch on one connection holds no more calls than this
local ANSWERS_SECONDS = 3600
local SILENCE_MS = 6000 -- several heartbeats of any member
local PLACE = 2 ^ -20 -- between two groups that were put back
local BUCKET = 256 -- fields of a final: bucket, few enough to stay in the compact encoding

local function key(name) return prefix .. name end

local function now_ms()
  local t = redis.call('time')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- One command for a whole list, which is cheaper than a call for each of its items; what follows the
-- list are the command's first words.
local SLICE = 1000 -- even, for lists of pairs; unpack takes no more than some thousands
local function many(list, ...)
  for first = 1, #list, SLICE do
    local words = {...}
    for i = first, math.min(first + SLICE - 1, #list) do words[#words + 1] = list[i] end
    redis.call(unpack(words))
  end
end

-- A full Redis lets a script write only after it has deleted, were it nothing. For what overwrites
-- little, and for what has to happen before anybody can free memory.
local function even_when_full() redis.call('del', key('nothing')) end

local function hint(channel) redis.call('publish', key('hint:' .. channel), '') end

-- What a call may hold. Redis keeps what a script wrote before it failed, so each script first looks
-- at all of its arguments: a check is nil, or the refusal that the script returns at once.
local script = ''
local MOST_WHOLE = 99999999999999 -- Lua writes numbers of 14 digits in full
local MOST_SERIAL = 4294967295 -- the last bit of a Redis string
local LABEL_BYTES, TEXT_BYTES = 256, 65536

local function shown(value)
  if value == nil then return 'missing' end
  return "'" .. string.gsub(string.sub(value, 1, 60), '[^ -~]', '?') .. "'"
end

local function refuse(text) return redis.error_reply('REFUSED ' .. script .. ': ' .. text) end

local function unfit(i, name, wanted)
  return refuse('argument ' .. i .. ' (' .. name .. ') is ' .. shown(ARGV[i]) .. ', not ' .. wanted ..
    ': nothing was changed; call it through tandem.replay, of one version in all processes')
end

local function whole(i, name, least, most)
  local text = ARGV[i]
  if text and #text < 15 and (string.find(text, '^[1-9]%d*$') or text == '0') then
    local value = tonumber(text)
    if value >= (least or 0) and value <= (most or MOST_WHOLE) then return nil end
  end
  return unfit(i, name, string.format('a whole number from %.0f to %.0f', least or 0,
    most or MOST_WHOLE))
end

-- Names and reasons come back in JSON, which half a character would spoil.
local function is_utf8(text)
  if not string.find(text, '[\128-\255]') then return true end
  local tail = '[\128-\191]'
  for _, whole_character in ipairs({
    '[\194-\223]' .. tail,
    '\224[\160-\191]' .. tail, '[\225-\236\238\239]' .. tail .. tail, '\237[\128-\159]' .. tail,
    '\240[\144-\191]' .. tail .. tail, '[\241-\243]' .. tail .. tail .. tail,
    '\244[\128-\143]' .. tail .. tail,
  }) do
    text = string.gsub(text, whole_character, ' ')
  end
  return not string.find(text, '[\128-\255]')
end

-- A reward, or nothing.
local function is_reward(value)
  return value == '' or (#value < 33 and string.find(value, '^%-?%d+%.?%d*e?[+-]?%d*$')
    and math.abs(tonumber(value) or math.huge) < math.huge)
end

local function text(i, name, least)
  local value = ARGV[i]
  if value and #value >= (least or 0) and #value <= TEXT_BYTES and is_utf8(value) then return nil end
  return unfit(i, name, 'UTF-8 text of ' .. (least or 0) .. ' to ' .. TEXT_BYTES .. ' bytes')
end

local function label(i, name, least)
  local value = ARGV[i]
  if value and #value >= (least or 1) and #value <= LABEL_BYTES and not string.find(value, '%c')
      and is_utf8(value) then
    return nil
  end
  return unfit(i, name, 'a name of ' .. (least or 1) .. ' to ' .. LABEL_BYTES .. ' bytes')
end

local function one_of(i, name, ...)
  for _, choice in ipairs({...}) do
    if ARGV[i] == choice then return nil end
  end
  return unfit(i, name, 'one of ' .. table.concat({...}, ', '))
end

local function hexadecimal(i, name)
  local value = ARGV[i]
  if value and #value <= 64 and string.find(value, '^%x+$') then return nil end
  return unfit(i, name, 'a hexadecimal digest')
end

-- JSON as its writers write it, in ASCII alone; nil where it isn't that, or begins otherwise.
local function decoded(value, first)
  if type(value) ~= 'string' or string.find(value, '[^ -~]') or string.sub(value, 1, 1) ~= first then
    return nil
  end
  local fine, found = pcall(cjson.decode, value)
  if fine and type(found) == 'table' then return found end
end

local function object(i, name)
  if decoded(ARGV[i], '{') then return nil end
  return unfit(i, name, 'a JSON object in ASCII')
end

local function is_count(value, least, most)
  return type(value) == 'number' and value >= (least or 0) and value <= (most or MOST_WHOLE)
    and value == math.floor(value)
end

-- How many items a decoded list has; nil where it isn't one.
local function length_of(list)
  if type(list) ~= 'table' then return nil end
  local n = 0
  for _ in pairs(list) do n = n + 1 end
  for i = 1, n do
    if list[i] == nil then return nil end
  end
  return n
end

local function are_labels(list)
  local n = length_of(list)
  for i = 1, n or 0 do
    if type(list[i]) ~= 'string' or #list[i] > LABEL_BYTES then return false end
  end
  return n ~= nil
end

-- Whether a decoded list has whole numbers only, ascending.
local function are_places(list)
  local n, before = length_of(list), -1
  for i = 1, n or 0 do
    if not is_count(list[i], before + 1) then return false end
    before = list[i]
  end
  return n ~= nil
end

local function labels(i, name)
  if ARGV[i] == '[]' or are_labels(decoded(ARGV[i], '[')) then return nil end
  return unfit(i, name, 'a JSON list of names in ASCII')
end

-- The first check of every script: who calls, and with how many arguments.
local function called(name, least, most)
  script = name
  if #KEYS ~= 1 or #prefix > LABEL_BYTES or #prefix < 9 or string.sub(prefix, 1, 7) ~= 'tandem:'
      or string.find(prefix, ':', 8, true) ~= #prefix then
    return refuse(#KEYS .. ' keys, the first is ' .. shown(prefix) ..
      ', not one key tandem:<run id>: alone; nothing was changed')
  end
  if #ARGV < least or #ARGV > (most or least) then
    return refuse(#ARGV .. ' arguments, not ' .. least .. (most and ' or more' or '') ..
      ': nothing was changed; do all processes run one version of Tandem?')
  end
  if #caller < 1 or #caller > LABEL_BYTES then
    return unfit(1, 'caller', 'a name of 1 to ' .. LABEL_BYTES .. ' bytes')
  end
  return whole(2, 'request number')
end

-- The answer that this very request got before, or nil; or a refusal, if another script gave one.
local function first_answer()
  local kept = redis.call('hget', key('answers:' .. caller), request % ANSWERS_KEPT)
  if not kept then return nil end
  local number, name, given = string.match(kept, '^(%d+) (%S+) (.*)$')
  if number ~= ARGV[2] then return nil end
  if name == script then return given end
  return refuse('request ' .. request .. ' of caller ' .. shown(caller) .. ' was a ' .. name ..
    ': nothing was changed; each call has a number of its own')
end

-- Keeps the answer for a repeat of this request, in the place of an earlier one, and returns it.
local function answer(given)
  local name = key('answers:' .. caller)
  redis.call('hset', name, request % ANSWERS_KEPT, ARGV[2] .. ' ' .. script .. ' ' .. given)
  redis.call('expire', name, ANSWERS_SECONDS)
  return given
end

-- Fields of meta as a table; whole numbers as numbers. Refuses a server without the ledger.
local NUMBERS = {
  term = true, journalled = true, cursor = true, trimmed = true, groups_per_step = true,
  max_staleness = true, window = true, lease_ms = true, group_deadline_ms = true,
  max_attempts = true, max_inflight = true, steps = true, total_groups = true,
  pass_length = true, group_bytes = true, offline = true, least_verdicts = true,
  group_size = true, dynamic_sampling = true, left_out = true, least_mean = true,
  greatest_mean = true,
}
local function meta(...)
  local names = {...}
  local values = redis.call('hmget', key('meta'), 'created', ...)
  if not values[1] then
    return nil, redis.error_reply('REFUSED this Redis holds no ledger of run ' ..
      string.sub(prefix, 8, -2) .. ': start the run, or join with its own join file')
  end
  local found = {}
  for i, name in ipairs(names) do
    local value = values[i + 1]
    if NUMBERS[name] then value = tonumber(value) end
    if value == false then value = nil end
    found[name] = value
  end
  return found
end

-- An error if the caller's term isn't the ledger's, else nil.
local function fenced(held, term)
  if tonumber(term) == held then return nil end
  return redis.error_reply('FENCED this learner has term ' .. term .. ', the ledger has term ' ..
    held .. ': a newer learner has taken over; end this process')
end

local function id_of(serial, pass_length)
  return string.format('%d-%d', math.floor(serial / pass_length), serial % pass_length)
end

-- The inverse; nil of what is no id.
local function serial_of(id, pass_length)
  if type(id) ~= 'string' or #id > 21 then return nil end
  local pass, position = string.match(id, '^(%d+)-(%d+)$')
  if not pass then return nil end
  local serial = tonumber(pass) * pass_length + tonumber(position)
  if serial <= MOST_SERIAL and id_of(serial, pass_length) == id then return serial end
end

local function group_key(serial) return key('group:' .. serial) end

local function final_place(serial)
  return key('final:' .. math.floor(serial / BUCKET)), serial % BUCKET
end

local function set_final(serial, text)
  local name, field = final_place(serial)
  redis.call('hset', name, field, text)
end

-- The same for a list of {serial, text}.
local function set_finals(finals)
  local buckets = {}
  for _, final in ipairs(finals) do
    local name, field = final_place(final[1])
    local list = buckets[name] or {}
    buckets[name] = list
    list[#list + 1] = field
    list[#list + 1] = final[2]
  end
  for name, list in pairs(buckets) do many(list, 'hset', name) end
end

-- State letter, step, attempt and reason of a group that is no longer live, or nil.
local function get_final(serial)
  local name, field = final_place(serial)
  local text = redis.call('hget', name, field)
  if not text then return nil end
  local letter, step, attempt, reason = string.match(text, '^(%a):(%d+):(%d+):?(.*)$')
  return letter, tonumber(step), tonumber(attempt), reason
end

-- Forgets that a group was rejected: it is put back, or stands in a row of the journal.
local function forget_rejection(serial)
  local letter, _, attempt, reason = get_final(serial)
  if letter ~= 'R' then return nil end
  redis.call('hdel', key('dead'), serial)
  redis.call('setbit', key('rejected:' .. reason), serial, 0)
  local name, field = final_place(serial)
  redis.call('hdel', name, field)
  return attempt
end

-- leased | returned | graded -> rejected(reason). Deletes come first: they are allowed when full.
local function reject(serial, reason, step, pass_length)
  redis.call('zrem', key('leased'), serial)
  redis.call('zrem', key('deadlines'), serial)
  redis.call('zrem', key('returned'), serial)
  redis.call('zrem', key('graded'), serial)
  redis.call('zrem', key('ages'), serial)
  local name = group_key(serial)
  local known = redis.call('hmget', name, 'attempt', 'digest')
  local attempt = known[1] or 0
  if known[2] then
    redis.call('unlink', key('payload:' .. id_of(serial, pass_length) .. ':' .. attempt .. ':'
      .. known[2]))
  end
  redis.call('unlink', name)
  set_final(serial, 'R:' .. step .. ':' .. attempt .. ':' .. reason)
  redis.call('setbit', key('rejected:' .. reason), serial, 1)
end

-- leased -> admitted; or, where the attempt counts as failed and was the last, -> rejected.
local function release(serial, failed, reason, m)
  local place = redis.call('zscore', key('leased'), serial) or serial
  redis.call('zrem', key('leased'), serial)
  redis.call('zrem', key('deadlines'), serial)
  local name = group_key(serial)
  if failed then
    local failures = redis.call('hincrby', name, 'failures', 1)
    if failures >= m.max_attempts then
      local known = redis.call('hmget', name, 'attempt', 'worker')
      redis.call('hset', key('dead'), serial, cjson.encode({
        group_id = id_of(serial, m.pass_length), attempt = tonumber(known[1]),
        worker = known[2], reason = reason, failures = failures,
      }))
      reject(serial, 'attempts', 0, m.pass_length)
      return
    end
  end
  redis.call('hset', name, 'state', 'admitted', 'released', reason)
  redis.call('zadd', key('returned'), place, serial)
end

-- Whose claim of an evaluation it is, and the ms at which it expires; nil where there is none.
local function claim_of(id)
  local claim = redis.call('hget', key('evaluation_claims'), id)
  if not claim then return nil end
  local expires, member = string.match(claim, '^(%d+) (.*)$')
  return member, tonumber(expires)
end

local function set_claim(id, member, expires)
  redis.call('hset', key('evaluation_claims'), id,
    string.format('%d %s', math.max(0, expires), member))
end

-- Those of leases, and of claims of evaluations.
local function move_deadlines(ms)
  for _, serial in ipairs(redis.call('zrange', key('leased'), 0, -1)) do
    redis.call('zincrby', key('deadlines'), ms, serial)
    redis.call('hincrby', group_key(serial), 'cap', ms)
    redis.call('hset', group_key(serial), 'moved', 1)
  end
  for _, id in ipairs(redis.call('hkeys', key('evaluation_claims'))) do
    local member, expires = claim_of(id)
    set_claim(id, member, expires + ms)
  end
end

-- Whether a lease hasn't been renewed since deadlines last moved on: an outage may have ended its
-- holder, which is no fault of the group's.
local function is_of_outage(serial)
  return redis.call('hget', group_key(serial), 'moved') == '1'
end

local function server_life()
  return string.match(redis.call('info', 'server'), 'run_id:(%w+)')
end

-- In a new life of the server, moves all deadlines on by one lease time, once: nobody could renew
-- while it was down. Returns whether it did.
local function moved_on_in_new_life()
  local life = server_life()
  if redis.call('get', key('server')) == life then return false end
  redis.call('del', key('server')) -- a delete comes first: see reject
  redis.call('set', key('server'), life)
  local lease_ms = tonumber(redis.call('hget', key('meta'), 'lease_ms'))
  if not lease_ms then return false end
  move_deadlines(lease_ms)
  return true
end

-- Where no member at all was heard of for long, the server was stopped or out of reach, and nobody
-- could renew: moves all deadlines on by that time, once. Returns whether it did.
local function moved_on_after_silence(now)
  local silence = now - tonumber(redis.call('get', key('heard')) or now)
  if silence < SILENCE_MS then return false end
  redis.call('del', key('heard'))
  redis.call('set', key('heard'), now)
  move_deadlines(silence)
  return true
end

local function moved_on(now)
  local in_new_life = moved_on_in_new_life()
  return moved_on_after_silence(now) or in_new_life
end

-- Leases past their deadline go back, each with a failed attempt, unless an outage may have ended its
-- holder. Returns how many.
local function expire_due(now, m)
  local function find()
    return redis.call('zrangebyscore', key('deadlines'), '-inf', now, 'limit', 0, 1024)
  end
  local due = find()
  if #due > 0 and moved_on(now) then due = find() end
  for _, serial in ipairs(due) do release(serial, not is_of_outage(serial), 'lease expired', m) end
  if #due > 0 then hint('taken') end
  return #due
end

-- The group that a cut waits for, as a table: the first unfinished one, or the one given.
local function waited_for(m, serial)
  if not serial then
    local leased = redis.call('zrange', key('leased'), 0, 0, 'withscores')
    local back = redis.call('zrange', key('returned'), 0, 0, 'withscores')
    serial = leased[1]
    if back[1] and (not serial or tonumber(back[2]) < tonumber(leased[2])) then serial = back[1] end
  end
  if not serial then
    return {group_id = id_of(m.cursor, m.pass_length), state = 'admitted', worker = '',
            reason = 'no worker has leased it yet'}
  end
  local known = redis.call('hmget', group_key(serial), 'state', 'worker', 'released', 'leased_ms')
  local waited = {group_id = id_of(tonumber(serial), m.pass_length), state = known[1],
                  worker = known[2] or '', reason = ''}
  if known[1] == 'leased' then
    -- A clock that was put back would have it leased in the future.
    local ms = math.max(0, now_ms() - tonumber(known[4]))
    waited.reason = string.format('leased for %.1f s', ms / 1000)
  else
    waited.reason = 'not leased again since: ' .. (known[3] or '')
  end
  return waited
end
