"""How much memory a program and all that it has started take together, files in memory included.

Address-space limits hold for one process each. What no process has mapped (System V segments,
memory files, other namespaces' file systems) is refused to it (:mod:`tandem.reward.sandbox.syscall_filter`), so that
what is left is what its processes hold and what lies in its working folders.
"""

from __future__ import annotations

import os

PAGE = os.sysconf("SC_PAGESIZE")
FOLDERS = ("/", "/work", "/tmp")
"""Where a boxed program may write."""


def descendants(pid: int) -> list[int]:
    """Ids of all processes that a process has started and that live."""
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
            continue  # It has ended meanwhile.
    return found


def exceeds(pids: list[int], limit: int) -> bool:
    """Whether processes hold more than so many bytes.

    The sum of what is resident is looked at first: it counts shared pages once per process, so that
    only where it is over the limit each process's share of its pages is added up.
    """
    files = _in_files(pids)
    if files + sum(map(_resident, pids)) <= limit:
        return False
    return files + sum(map(_proportional, pids)) > limit


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
    """Bytes in the file systems of a box, each counted once; none of those that are ours, too."""
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
