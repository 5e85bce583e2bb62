"""A run's callbacks: the process that calls them, and the one that sees to it that they can do no harm."""
