"""This host: what a run needs of it and what it lacks, its redis-server, and the lock of a folder."""
