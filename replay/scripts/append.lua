-- append: adds an entry to a list of things that happened, once.
-- ARGV: 3 list, 4 entry, 5 most entries kept. Answer: 1.
if first_answer() then return 1 end
redis.call('rpush', key(ARGV[3]), ARGV[4])
redis.call('ltrim', key(ARGV[3]), -tonumber(ARGV[5]), -1)
answer('1')
return 1
