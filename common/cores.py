"""The CPU cores that this process may use."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

from .control_groups import LISTED, ROOT, groups


def usable_cores() -> int:
    """Cores that this process may run on, no more than its control groups let it use at a time; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    bound = quota()
    return cores if bound is None else max(1, min(cores, int(bound)))


def quota(listed: Path = LISTED, root: Path = ROOT) -> float | None:
    """Cores' worth of time that the control groups of this process grant it, as containers have them; None = no bound.

    Read from ``cpu.max`` of its group and of those above it (control groups version 2; cgroup-v2.rst of the Linux
    kernel), which holds microseconds of a period, and the period.
    """
    bounds = []
    for folder in chain.from_iterable(groups("cpu", listed, root)):
        try:
            granted, period = (folder / "cpu.max").read_text().split()
            bounds.append(float(granted) / float(period))
        except (OSError, ValueError):
            # No such file at the root, "max" where there is no bound.
            continue
    return min(bounds, default=None)
