-- new_term: a learner starts; all older ones are fenced from now on.
-- ARGV: 3 the greatest term that the journal knows.
-- After: term is greater than it was and than the journal's. Answer: the term.
local given = first_answer()
if given then return tonumber(given) end
local m, missing = meta('term')
if not m then return missing end
local term = math.max(m.term, tonumber(ARGV[3])) + 1
redis.call('hset', key('meta'), 'term', term)
answer(term)
return term
