"""What limits a child process that runs code of others: it ends with its parent, and isn't root where it needn't be."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from pathlib import Path

NOBODY = 65534
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


def libc() -> ctypes.CDLL:
    """The C library."""
    return ctypes.CDLL(None, use_errno=True)


def _control(option: int, value: int) -> bool:
    try:
        return bool(libc().prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False  # Not Linux: the other limits still apply.


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; ends it now if that has happened."""
    if _control(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(0)


def adopt_orphans(yes: bool = True) -> bool:
    """Makes this process the parent of all its descendants whose own parent ends, so that none gets away, or no longer;
    False where the kernel can't."""
    return _control(_PR_SET_CHILD_SUBREAPER, int(yes))


def hide_memory() -> bool:
    """Keeps other processes of the same user from reading this one's memory and environment."""
    return _control(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> bool:
    """Makes programs with the set-user-id bit run without it, for good."""
    return _control(_PR_SET_NO_NEW_PRIVS, 1)


def can_drop_user(user: int = NOBODY) -> bool:
    """Whether this is root's process and may become one of that user. It may not where root is without capabilities,
    as in some containers, or without other users, as in a user namespace of one. Tried in a child."""
    if os.geteuid() != 0:
        return False
    child = os.fork()
    if child == 0:
        try:
            drop_user(user)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def drop_user(user: int = NOBODY) -> None:
    """Makes root's process one of a user without rights; ``die_with`` must be called after it.

    Raises:
        OSError: it may not (:func:`can_drop_user`).
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def readable_by_others(path: str) -> bool:
    """Whether any user may read a file, which takes access to every folder above it."""
    here = Path(path).resolve()
    try:
        if not here.stat().st_mode & stat.S_IROTH:
            return False
        return all(folder.stat().st_mode & stat.S_IXOTH for folder in here.parents)
    except OSError:
        return False
