"""Starts one process so that it ends when its supervisor does, even by ``kill -9``.

``python -P -m tandem.launch.lifeline PARENT_PID role ARGS…`` runs a tandem sub-command;
``… PARENT_PID exec PROGRAM ARGS…`` becomes another program (redis-server);
``… PARENT_PID early role ARGS…`` loads the role's libraries, and runs it once the run is there.

Linux delivers a signal of our choice when the parent dies (``PR_SET_PDEATHSIG``, prctl(2)), and
this setting survives ``exec``. Roles get SIGKILL: everything that they had acknowledged is in Redis
or in the journal. redis-server gets SIGTERM, so that it writes out what the kernel doesn't hold yet.
Elsewhere a thread checks whether the parent is still there.
"""

from __future__ import annotations

import os
import signal
import sys

from .host.kinship import tie_to


def main(argv: list[str]) -> int:
    """Ties this process to its parent, then becomes the role or the program."""
    parent, kind, *rest = argv
    if kind == "exec":
        tie_to(int(parent), signal.SIGTERM)
        os.execv(rest[0], rest)
    tie_to(int(parent), signal.SIGKILL)
    # On Ctrl-C the supervisor sends its children SIGTERM itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if kind == "early":
        from .commands.roles import await_run

        kind, *rest = await_run(rest[0])
    from .cli import main as tandem

    return tandem([kind, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
