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

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1


def tie_to(parent: int, death_signal: signal.Signals) -> None:
    """Makes this process get ``death_signal`` when ``parent`` dies; exits if it is dead already."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0):
            code = ctypes.get_errno()
            raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # The parent may have died between our fork and the call above.
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


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
