"""One file per sub-command: the only place that combines the rooms.

A module's docstring is the description in its ``--help``; ``add_arguments(parser)`` declares its
options, and ``run(arguments)`` returns the exit code.
"""
