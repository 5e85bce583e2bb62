-- new_term: a learner starts; all older ones are fenced from now on.
-- ARGV: 3 the greatest term that the journal knows.
-- After: term is greater than it was and than the journal's. Answer: the term.
local wrong = called('new_term', 3) or whole(3, 'term', 0, 9999999999999)
if wrong then return wrong end
local given = first_answer()
if given then return tonumber(given) or given end
local m, missing = meta('term')
if not m then return missing end
local term = math.max(m.term, tonumber(ARGV[3])) + 1
even_when_full() -- only a learner frees memory
redis.call('hset', key('meta'), 'term', term)
answer(term)
return term
