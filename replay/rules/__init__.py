"""The ledger's rules as functions of values; the Lua scripts apply the same ones."""
