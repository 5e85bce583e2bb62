"""How much memory a program and all that it has started take together, including files in memory.

An address-space limit applies to one process each. Memory that no process has mapped (System V
segments, memory files, other namespaces' file systems) is refused
(:mod:`tandem.reward.sandbox.syscall_filter`), so what counts is what its processes hold and what is in its
working folders.
"""

from __future__ import annotations

import os

from .entering import HOME

PAGE = os.sysconf("SC_PAGESIZE")
FOLDERS = ("/", HOME, "/tmp", "/dev")
"""Folders in which a boxed program may write; bubblewrap has one in ``/dev``, ``/dev/shm``."""


def descendants(pid: int) -> list[int]:
    """Ids of all living processes that a process has started, directly or not."""
    found: list[int] = []
    left = [pid]
    while left:
        parent = left.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                left += children
        except OSError:
            continue  # It has ended in the meantime.
    return found


def exceeds(pids: list[int], limit: int) -> bool:
    """Whether processes together hold more than ``limit`` bytes.

    Resident memory is summed first; it counts shared pages once per process, so only if that sum is
    over the limit is each process's proportional share added up.
    """
    files = _in_files(pids)
    if files + sum(map(_resident, pids)) <= limit:
        return False
    # Twice, since processes that end while they are read leave larger shares to those read after.
    return all(files + sum(map(_proportional, pids)) > limit for _ in range(2))


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except PermissionError:
        return _resident(pid)
    except (OSError, IndexError):
        return 0
    return 0


def _in_files(pids: list[int]) -> int:
    """Bytes in the box's file systems, each counted once, without file systems that we use too."""
    used: dict[int, int] = {}
    for pid in pids[:1]:
        for folder in FOLDERS:
            inside = f"/proc/{pid}/root{folder}"
            try:
                device = os.stat(inside).st_dev
                if os.path.exists(folder) and os.stat(folder).st_dev == device:
                    continue
                room = os.statvfs(inside)
            except OSError:
                continue
            used[device] = (room.f_blocks - room.f_bfree) * room.f_frsize
    return sum(used.values())
