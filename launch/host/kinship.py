"""Whose child a process is, and what becomes of it when its parent dies: Linux's prctl(2)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def tie_to(parent: int, death_signal: signal.Signals) -> None:
    """Makes this process get ``death_signal`` when ``parent`` dies; exits if it is dead already."""
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, int(death_signal))
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # The parent may have died between our fork and the call above.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans(yes: bool) -> None:
    """Has the kernel hand orphans among this process's descendants to this process, or no longer.

    Raises:
        OSError: the system can't.
    """
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} hands orphans to nobody but init")
    _prctl(PR_SET_CHILD_SUBREAPER, int(yes))


def _prctl(option: int, value: int) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
