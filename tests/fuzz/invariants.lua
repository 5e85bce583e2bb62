-- Looks at a whole ledger and says what is wrong with it. It shares no line with the scripts that it
-- watches: what it knows of them is the protocol's text and the names of the keys.
--
-- KEYS: 1 prefix of the run. ARGV: 1 "again" looks even where nothing was written, 2 "repaired" where
-- rows were written from a journal: their payloads may be lost, and leases out of them too old.
-- Answer: 0 where nothing was written since the last look, else
-- {breaches, a letter for each serial, term, J, trimmed, cursor, rows as JSON, leases}.
-- The letters: L leased, B back (returned), G graded, T taken, D trained, R rejected, ? none of them.

local prefix, repaired = KEYS[1], ARGV[2] == 'repaired'
local function call(...) return redis.call(...) end
local function k(name) return prefix .. name end

local dirty = tonumber(string.match(call('info', 'persistence'), 'rdb_changes_since_last_save:(%d+)'))
local last = tonumber(call('get', 'fuzz:dirty') or -1)
if dirty == last and ARGV[1] ~= 'again' then return 0 end

local breaches = {}
local function say(...) breaches[#breaches + 1] = table.concat({...}, ' ') end

local function hash(name)
  local flat, found = call('hgetall', k(name)), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

local function zset(name)
  local flat, found, n = call('zrange', k(name), 0, -1, 'withscores'), {}, 0
  for i = 1, #flat, 2 do
    found[flat[i]] = tonumber(flat[i + 1])
    n = n + 1
  end
  return found, n
end

-- Both writes count as changes themselves. A delete comes first, for a full server.
local function done() call('set', 'fuzz:dirty', dirty + call('del', 'fuzz:dirty') + 1) end

local function whole(value)
  local number = tonumber(value)
  return number and number >= 0 and number == math.floor(number) and number < 2 ^ 53 and number
end

-- Names of keys. One of another type than it should be makes this script itself fail, below.
local NAMES = {
  meta = 1, leased = 1, deadlines = 1, returned = 1, graded = 1, ages = 1, taken = 1, trained = 1,
  rows = 1, quarantined = 1, server = 1, heard = 1, dead = 1, members = 1, beats = 1,
  evaluations = 1, evaluations_open = 1, evaluation_claims = 1, evaluation_failures = 1,
  evaluation_results = 1, evaluation_samples = 1,
  problems = 1, traces = 1, reports = 1, config = 1, curve_client = 1, eval_sets = 1,
  callback_requests = 1, callback_served = 1, callback_stopped = 1, meeting = 1,
}
local FAMILIES = {
  group = 1, final = 1, rejected = 1, payload = 1, answers = 1, problem_rows = 1, eval = 1,
}
local REASONS = {stale = 1, quarantined = 1, attempts = 1, ungraded = 1, run_ended = 1}
local live_keys, payloads, buckets, rejections = {}, {}, {}, {}
for _, name in ipairs(call('keys', prefix .. '*')) do
  local short = string.sub(name, #prefix + 1)
  local family, rest = string.match(short, '^([a-z_]+):(.*)$')
  if not (NAMES[short] or (family and FAMILIES[family])) then
    -- A list of things that happened may have any name of small letters.
    local kind = call('type', name)['ok']
    if kind ~= 'list' or not string.find(short, '^[a-z_]+$') then
      say('stray key', short, 'of type', kind)
    end
  end
  if family == 'group' then live_keys[rest] = true end
  if family == 'payload' then payloads[rest] = call('ttl', name) end
  if family == 'final' then buckets[rest] = true end
  if family == 'rejected' then
    rejections[rest] = true
    if not REASONS[rest] then say('rejected for the unknown reason', rest) end
  end
end

-- Settings and counters.
local meta = hash('meta')
if not meta.created then
  for _, name in ipairs({'leased', 'returned', 'graded', 'taken', 'rows'}) do
    if call('exists', k(name)) == 1 then say(name, 'is there without a ledger') end
  end
  done()
  return {table.concat(breaches, '; '), '', 0, 0, 0, 0, '', 0}
end
for _, name in ipairs({'term', 'journalled', 'cursor', 'trimmed', 'groups_per_step', 'max_staleness',
    'window', 'lease_ms', 'group_deadline_ms', 'max_attempts', 'max_inflight', 'steps',
    'total_groups', 'pass_length', 'group_bytes', 'passes', 'group_size', 'offline',
    'least_verdicts', 'sorted_up_to'}) do
  if not whole(meta[name]) then say('meta', name, 'is', meta[name] or 'missing') end
end
for _, name in ipairs({'sources', 'seed', 'data_digest', 'late', 'state'}) do
  if not meta[name] then say('meta', name, 'is missing') end
end
if #breaches > 0 then
  done()
  return {table.concat(breaches, '; '), '', 0, 0, 0, 0, '', 0}
end
local J, cursor, trimmed = tonumber(meta.journalled), tonumber(meta.cursor), tonumber(meta.trimmed)
local B, eta = tonumber(meta.groups_per_step), tonumber(meta.max_staleness)
local length = tonumber(meta.pass_length)
if trimmed > J then say('trimmed', trimmed, 'is past J', J) end

-- One state for each serial.
local leased, leases = zset('leased')
local returned, graded = zset('returned'), zset('graded')
local taken, deadlines, ages = zset('taken'), zset('deadlines'), zset('ages')
local state, attempt_of, step_of, reason_of = {}, {}, {}, {}
local function claim(member, letter)
  local serial = whole(member)
  if not serial or tostring(serial) ~= member then
    say('member', member, 'is no serial')
  elseif state[serial] then
    say('group', member, 'is in', state[serial], 'and in', letter)
  elseif serial >= cursor then
    say('group', member, 'is in', letter, 'and past the cursor', cursor)
  else
    state[serial] = letter
  end
  return serial
end
-- A group stands at its serial, or, where it was put back, behind it and between two serials.
local places, at = {}, {}
local function stands(serial, score)
  if not serial then return end
  if score ~= serial and (score < serial or score == math.floor(score) or score >= cursor) then
    say('group', serial, 'stands at', score)
  end
  if at[score] then say('groups', at[score], 'and', serial, 'stand at', score) end
  at[score] = serial
  places[#places + 1] = score
end
for member, score in pairs(leased) do
  stands(claim(member, 'L'), score)
  if not deadlines[member] then say('leased group', member, 'has no deadline') end
end
for member in pairs(deadlines) do
  if not leased[member] then say('group', member, 'has a deadline and no lease') end
end
for member, score in pairs(returned) do
  stands(claim(member, 'B'), score)
end
for member, score in pairs(graded) do
  stands(claim(member, 'G'), score)
end
for member, score in pairs(ages) do
  if not graded[member] then say('group', member, 'has an age and is not graded') end
  if not whole(score) then say('group', member, 'has the age', score) end
end
local counts, bitmaps = {}, {}
local function bit(bitmap, serial)
  bitmaps[bitmap] = bitmaps[bitmap] or call('get', k(bitmap)) or ''
  local byte = string.byte(bitmaps[bitmap], math.floor(serial / 8) + 1) or 0
  return math.floor(byte / 2 ^ (7 - serial % 8)) % 2
end
for bucket in pairs(buckets) do
  for field, value in pairs(hash('final:' .. bucket)) do
    local serial = tonumber(bucket) * 256 + tonumber(field)
    local letter, step, attempt, reason = string.match(value, '^([TDR]):(%d+):(%d+):?([a-z_]*)$')
    if not letter or (letter == 'R') ~= (reason ~= '') then
      say('final place of', serial, 'is', value)
    else
      claim(tostring(serial), letter)
      step_of[serial], attempt_of[serial], reason_of[serial] = tonumber(step), attempt, reason
      local bitmap = letter == 'D' and 'trained' or letter == 'R' and 'rejected:' .. reason
      if bitmap then
        counts[bitmap] = (counts[bitmap] or 0) + 1
        if bit(bitmap, serial) ~= 1 then say('group', serial, 'is not in', bitmap) end
      end
      if letter == 'T' and taken[tostring(serial)] ~= tonumber(step) then
        say('group', serial, 'is taken by step', step, 'and the set says',
          tostring(taken[tostring(serial)]))
      end
    end
  end
end
for member in pairs(taken) do
  if state[tonumber(member)] ~= 'T' then say('group', member, 'is in taken and finally not') end
end
for reason in pairs(rejections) do
  local bits = call('bitcount', k('rejected:' .. reason))
  if bits ~= (counts['rejected:' .. reason] or 0) then
    say('rejected:' .. reason, 'has', bits, 'bits for', counts['rejected:' .. reason] or 0, 'groups')
  end
end
if call('bitcount', k('trained')) ~= (counts.trained or 0) then say('trained has bits of no group') end
local letters = {}
for serial = 0, cursor - 1 do
  letters[serial + 1] = state[serial] or '?'
  if not state[serial] then say('group', serial, 'is in no state') end
end

-- Live groups.
local STATES = {L = 'leased', B = 'admitted', G = 'graded'}
local groups, wanted_payloads = {}, {}
local function id(serial) return string.format('%d-%d', math.floor(serial / length), serial % length) end
for member in pairs(live_keys) do
  local serial = tonumber(member)
  local should = STATES[state[serial] or '?']
  local group = hash('group:' .. member)
  groups[serial] = group
  if not should then
    say('group:' .. member, 'is kept, and the group is', state[serial] or '?')
  elseif group.state ~= should then
    say('group', member, 'calls itself', group.state or 'nothing', 'and is', should)
  elseif should == 'leased' then
    for _, field in ipairs({'attempt', 'term', 'step', 'leased_ms', 'cap'}) do
      if not whole(group[field]) then say('lease', member, 'has', field, group[field] or 'missing') end
    end
    if not group.worker or not group.holder then say('lease', member, 'has no holder') end
  elseif should == 'graded' then
    local fine, traces = pcall(cjson.decode, group.traces or '')
    if not fine or type(traces) ~= 'table' then say('group', member, 'has the traces', group.traces) end
    local correct, rows = whole(group.correct), group.own_rows
    if not correct or correct > whole(group.samples) then
      say('group', member, 'has correct samples', group.correct or 'missing')
    end
    if (meta.traces_when == 'all_failed') ~= (rows ~= nil) then
      say('group', member, 'has own rows', rows or 'missing')
    elseif rows and (not pcall(cjson.decode, rows) or #cjson.decode(rows) > whole(group.samples)) then
      say('group', member, 'has own rows', rows)
    end
    if (tonumber(group.samples) or 0) < tonumber(meta.least_verdicts) then
      say('group', member, 'is graded with', group.samples or 'no', 'samples')
    end
    wanted_payloads[id(serial) .. ':' .. (group.attempt or '') .. ':' .. (group.digest or '')] = true
  end
  if tonumber(group.failures or 0) >= tonumber(meta.max_attempts) then
    say('group', member, 'has failed', group.failures, 'times and is still live')
  end
end
for serial, letter in pairs(state) do
  if STATES[letter] and not groups[serial] then say('live group', serial, 'has no hash') end
end

-- Rows: one a step, no id twice, as large as they should be, with their payloads.
local rows, place, texts, quarantined = hash('rows'), {}, {}, hash('quarantined')
for field, value in pairs(rows) do
  local fine, row = pcall(cjson.decode, value)
  local step = tonumber(field)
  if not fine or type(row) ~= 'table' or row.step ~= step or type(row.groups) ~= 'table' then
    say('row', field, 'is', string.sub(value, 1, 80))
  else
    texts[#texts + 1] = field .. ' ' .. value
    local in_quarantine = quarantined[field] ~= nil
    if step > J then say('row', step, 'is past J', J) end
    if step <= trimmed and not in_quarantine then say('row', step, 'was let go and is there') end
    if #row.groups ~= B and not (row.short == true and #row.groups < B and #row.groups > 0) then
      say('row', step, 'has', #row.groups, 'groups')
    end
    local before = -1
    for _, entry in ipairs(row.groups) do
      local pass, position = string.match(tostring(entry.id), '^(%d+)-(%d+)$')
      local serial = pass and tonumber(pass) * length + tonumber(position) or -1
      if serial <= before then say('row', step, 'is out of order at', tostring(entry.id)) end
      before = serial
      if place[serial] then say('group', entry.id, 'stands in rows', place[serial], 'and', step) end
      place[serial] = step
      local letter = state[serial]
      if step_of[serial] ~= step or not (letter == 'T' or letter == 'D'
          or (letter == 'R' and reason_of[serial] == 'quarantined')) then
        say('group', entry.id, 'of row', step, 'is', letter or '?', step_of[serial] or '')
      end
      if tonumber(attempt_of[serial]) ~= entry.attempt then
        say('group', entry.id, 'of row', step, 'has attempt', tostring(entry.attempt))
      end
      local last = -1
      for n, sample in ipairs(entry.replaced or {}) do
        if not whole(sample) or sample <= last then
          say('group', entry.id, 'of row', step, 'has replaced sample', tostring(sample), 'as its', n)
        end
        last = whole(sample) or last
      end
      if entry.replaced and last < 0 then say('group', entry.id, 'of row', step, 'replaced nothing') end
      if in_quarantine ~= (letter == 'R') then say('row', step, 'is quarantined in part') end
      local name = entry.id .. ':' .. entry.attempt .. ':' .. tostring(entry.digest)
      wanted_payloads[name] = true
      if not payloads[name] and not repaired then say('payload', name, 'of row', step, 'is gone') end
    end
  end
end
for step = trimmed + 1, J do
  if not rows[tostring(step)] then say('row', step, 'is missing') end
end
for serial, letter in pairs(state) do
  if (letter == 'T' or letter == 'D' or reason_of[serial] == 'quarantined')
      and step_of[serial] > trimmed and place[serial] ~= step_of[serial] then
    say('group', serial, 'is', letter, 'of step', step_of[serial], 'and stands not in its row')
  end
  if letter == 'T' and step_of[serial] <= trimmed then say('group', serial, 'was trimmed untrained') end
end
for step in pairs(quarantined) do
  if not rows[step] then say('step', step, 'is quarantined and has no row') end
end
for name, ttl in pairs(payloads) do
  if ttl == -1 and not wanted_payloads[name] then say('payload', name, 'is kept for nobody') end
  if ttl ~= -1 and wanted_payloads[name] then say('payload', name, 'is wanted and will expire') end
end
for name in pairs(wanted_payloads) do
  if not payloads[name] and not repaired then say('payload', name, 'is gone') end
end

-- Admission: J + floor(r / B) - w <= eta for every lease, whenever it is asked.
if not repaired then
  table.sort(places)
  for rank, score in ipairs(places) do
    local serial = at[score]
    if state[serial] == 'L' and groups[serial] and tonumber(groups[serial].step) then
      local late = J + math.floor((rank - 1) / B) - tonumber(groups[serial].step)
      if late > eta then say('the lease of', serial, 'would become', late, 'steps old') end
    end
  end
  if meta.ended and #places > 0 then say('the run has ended and', #places, 'groups are live') end
end

-- Dead letters, members, evaluations.
for member, value in pairs(hash('dead')) do
  if reason_of[tonumber(member)] ~= 'attempts' then say('dead letter', member, 'is not rejected') end
  if not pcall(cjson.decode, value) then say('dead letter', member, 'is', value) end
end
local beats, members = zset('beats'), hash('members')
for member, value in pairs(members) do
  if not beats[member] then say('member', member, 'is there and does not beat') end
  local fine, entry = pcall(cjson.decode, value)
  if not fine or type(entry) ~= 'table' then say('member', member, 'is', value) end
end
local asked, results, open = hash('evaluations'), hash('evaluation_results'), zset('evaluations_open')
for name, step in pairs(open) do
  if not asked[name] then say('evaluation', name, 'is open and was not asked for') end
  if results[name] then say('evaluation', name, 'is open and done') end
  if not whole(step) then say('evaluation', name, 'is due at', step) end
end
local failures = hash('evaluation_failures')
for name in pairs(asked) do
  if not open[name] and not results[name] and not failures[name] then
    say('evaluation', name, 'is lost')
  end
end
for name, value in pairs(failures) do
  if not asked[name] then say('evaluation', name, 'has failed and was not asked for') end
  if results[name] then say('evaluation', name, 'has failures and is done') end
  if not string.find(value, '^[1-9]%d* ') then say('evaluation', name, 'has failures', value) end
end
for name, value in pairs(hash('evaluation_claims')) do
  if not open[name] then say('evaluation', name, 'is claimed and not open') end
  if not string.find(value, '^%d+ .') then say('evaluation', name, 'has the claim', value) end
end

done()
table.sort(texts)
return {table.concat(breaches, '; '), table.concat(letters), tonumber(meta.term), J, trimmed, cursor,
  table.concat(texts, '\n'), leases}
