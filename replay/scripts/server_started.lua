-- server_started: moves all lease deadlines on by one lease time in a new life of the server.
-- Before: called by whoever loads the scripts, ahead of any other script. (A server that kept its
-- scripts over a restart is found out when the first deadline is judged.)
-- After: deadlines and caps of leases are later by lease_ms, once a life. Answer: 1 if they moved.
local wrong = called('server_started', 2)
if wrong then return wrong end
return moved_on_in_new_life() and 1 or 0
