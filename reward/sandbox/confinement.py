"""Limits of a grader process: what a hostile answer may use up, and what it may never reach.

Some are for Linux only, as noted there. What the kernel refuses (an unprivileged ``unshare``) is left
out, and :func:`confine_zygote` returns those that are in force.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import stat
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
NOBODY = 65534


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def confine_zygote() -> list[str]:
    """Cuts the process (and all that it forks) off the network; returns what is in force.

    A socket pair that is already open keeps working, since Unix sockets need no network interface.
    """
    held = []
    try:
        libc = _libc()
        if libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
            held.append("no network")
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
            held.append("no new privileges")
    except (OSError, AttributeError):
        # Not Linux: the other limits still apply.
        return held
    return held


def readable_by_others(path: str) -> bool:
    """Whether any user may read a file, which takes access to every folder above it."""
    here = Path(path).resolve()
    try:
        if not here.stat().st_mode & stat.S_IROTH:
            return False
        return all(folder.stat().st_mode & stat.S_IXOTH for folder in here.parents)
    except OSError:
        return False


def confine_grader(memory_bytes: int, parent: int, *, drop_user: bool) -> None:
    """Limits a freshly forked grader; it ends with ``os._exit`` if its parent is gone.

    Address space ``memory_bytes``; no file may grow; 16 descriptors; no core dump; no child
    processes; a user other than root if that user can read the grader's files. :func:`allow_cpu` sets
    the CPU limit per request.
    """
    os.chdir("/")
    if drop_user and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if hasattr(resource, "RLIMIT_NPROC"):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    # Last, since a change of user clears it.
    die_with(parent)


def confine_runner(parent: int) -> None:
    """Limits a process that starts sandboxes: it ends with its parent, and dumps no core.

    It runs no code itself; the sandboxes' own limits are tighter (:mod:`tandem.reward.sandbox.sandbox`).
    """
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_with(parent)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; ends it now if that has happened."""
    try:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(0)


def allow_cpu(seconds: float) -> None:
    """Lets this process use this many more CPU seconds; beyond them the kernel ends it (SIGXCPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
