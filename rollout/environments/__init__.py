"""Episodes in environments: the servers that play them in processes of their own, and the worker's client of them."""
