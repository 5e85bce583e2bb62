"""Main memory of this process, and what it means that memory has run out.

``VmRSS`` is what a process holds now, and ``VmHWM`` the most that it has held; writing 5 to
``/proc/self/clear_refs`` makes the second start again from the first (proc_pid_clear_refs(5)).
"""

from __future__ import annotations

import errno
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import psutil

from .confinement import libc
from .control_groups import LISTED, ROOT, groups
from .errors import OutOfMemoryError
from .plain import one_line

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def resident() -> int:
    """Bytes of main memory that this process holds."""
    return _status("VmRSS") or int(psutil.Process().memory_info().rss)


def greatest() -> int:
    """The most bytes that it has held, since its start or since the last :func:`begin_again`."""
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total(listed: Path = LISTED, root: Path = ROOT) -> int:
    """Bytes of main memory that this machine has, or that the control groups of this process let it use, if that is less.

    Read from ``memory.max`` (version 2) or ``memory.limit_in_bytes`` (version 1) of its groups and of those above them.
    """
    bounds = [int(psutil.virtual_memory().total)]
    for folder in chain.from_iterable(groups("memory", listed, root)):
        for file in ("memory.max", "memory.limit_in_bytes"):
            try:
                bounds.append(int((folder / file).read_text()))
            except (OSError, ValueError):
                # No such file at the root, "max" where there is no bound.
                continue
    return min(bounds)


KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
"""Environment in which another program keeps up to 128 MB of what it frees, as with :func:`keep_freed`."""


def keep_freed(most: int = (1 << 31) - 1) -> bool:
    """Makes this process keep the memory that it frees, to use it again; False where the C library can't.

    glibc gives large blocks back to the kernel, which clears every page before it hands it out anew. That is a tenth of
    an update on a CPU, whose tensors have the same sizes each time, and a fifth of what large groups cost Redis. See
    mallopt(3).

    Args:
        most: bytes that are kept.
    """
    try:
        mallopt = libc().mallopt
    except (OSError, AttributeError):
        return False
    # Older versions take no greater threshold of the first kind.
    blocks = any(mallopt(_M_MMAP_THRESHOLD, size) for size in (1 << 30, 32 << 20))
    return blocks and bool(mallopt(_M_TRIM_THRESHOLD, most))


def begin_again() -> bool:
    """Makes :func:`greatest` start again from what the process holds now; False where that isn't possible."""
    try:
        _CLEAR.write_bytes(b"5")
    except OSError:
        return False
    return True


def _status(name: str) -> int | None:
    """A size from ``/proc/self/status``, in bytes; None where there is none."""
    try:
        text = _STATUS.read_bytes()
    except OSError:
        return None
    found = re.search(rb"^%s:\s+(\d+) kB" % name.encode(), text, re.MULTILINE)
    return None if found is None else int(found[1]) << 10


class Peaks:
    """The most main memory that this process held, from one call to the next.

    Where the kernel's mark can't be set back, a peak counts only if it is the highest so far; otherwise
    the answer is what the process holds at the call.
    """

    def __init__(self) -> None:
        begin_again()
        self._before = greatest()

    def take(self) -> int:
        """Bytes since the last call, or since this object was made."""
        most = greatest()
        if begin_again():
            return most
        before, self._before = self._before, most
        return most if most > before else resident()


# Running out of it.

_ALLOCATOR = re.compile(
    r"can't allocate memory|Cannot allocate memory|std::bad_alloc|out of memory"
)
"""What torch (on a CPU and on a GPU), safetensors and C++ libraries say if there is no memory left."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a GPU or on the host."""
    if isinstance(error, MemoryError | OutOfMemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # By name: a process without torch asks this too.
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    made_elsewhere = isinstance(error, RuntimeError) or type(error).__module__ != "builtins"
    return made_elsewhere and _ALLOCATOR.search(str(error)) is not None


def what_was_asked(error: BaseException) -> str:
    """The part of such an error that says how much was asked for, in one line."""
    text = " ".join(str(error).split())
    for pattern in (r"you tried to allocate (\d+) bytes", r"tried to allocate ([\d.]+ \w+)"):
        found = re.search(pattern, text, re.IGNORECASE)
        if found is not None and found[1].isdigit():
            return f"{int(found[1]):,} bytes"
        if found is not None:
            return found[1]
    return one_line(error)


@contextmanager
def telling_parts(parts: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Turns an error that says that there is no memory left into one with what this process holds.

    Args:
        parts: name to bytes of what the process holds, asked only then.

    Raises:
        OutOfMemoryError: in place of the first error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(what_was_asked(error), dict(parts())) from error


def kills(listed: Path = LISTED, root: Path = ROOT) -> int:
    """How often the kernel has killed a process for want of memory, by all counters that can be read: those
    of this process's control groups and the machine's."""
    counted = [_oom_kills(Path("/proc/vmstat"))]
    for own, *_ in groups("memory", listed, root):
        # Of version 2, and of version 1.
        counted += [_oom_kills(own / file) for file in ("memory.events", "memory.oom_control")]
    return sum(counted)


def _oom_kills(file: Path) -> int:
    """The counter ``oom_kill`` in a file of lines ``name number``; 0 if it can't be read."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == ["oom_kill"]), 0)
