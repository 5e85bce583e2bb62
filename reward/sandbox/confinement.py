"""Limits of a grader process: what a hostile answer may use up, and what it may never reach.

Some are for Linux only, as noted there. What the kernel refuses (an unprivileged ``unshare``) is left
out, and :func:`confine_zygote` returns those that are in force.
"""

from __future__ import annotations

import math
import os
import resource

from ...common.confinement import (
    can_drop_user,
    die_with,
    drop_user,
    libc,
    no_new_privileges,
)

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000


def confine_zygote() -> list[str]:
    """Cuts the process (and all that it forks) off the network; returns what is in force.

    A socket pair that is already open keeps working, since Unix sockets need no network interface.
    """
    held = []
    try:
        unshare = libc().unshare
        if unshare(_CLONE_NEWNET) == 0 or unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
            held.append("no network")
    except (OSError, AttributeError):
        # Not Linux: the other limits still apply.
        return held
    if no_new_privileges():
        held.append("no new privileges")
    if os.geteuid() == 0 and not can_drop_user():
        held.append("as root, who can become no other user here")
    return held


def confine_grader(memory_bytes: int, parent: int, *, drop: bool) -> None:
    """Limits a freshly forked grader; it ends with ``os._exit`` if its parent is gone.

    Address space ``memory_bytes``; no file may grow; 16 descriptors; no core dump; no child processes, except
    for root, whom this limit doesn't bind; with ``drop``, the user ``NOBODY``. :func:`allow_cpu` sets the CPU
    limit per request.
    """
    os.chdir("/")
    if drop:
        drop_user()
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


def allow_cpu(seconds: float) -> None:
    """Lets this process use this many more CPU seconds; beyond them the kernel ends it (SIGXCPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
