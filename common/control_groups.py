"""The control groups of this process, in which containers are bounded (cgroups(7))."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LISTED = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def groups(controller: str, listed: Path = LISTED, root: Path = ROOT) -> Iterator[list[Path]]:
    """Folders of this process's group and of those above it, in each hierarchy that may have a controller.

    A hierarchy of version 2 has all controllers, and one of version 1 those that it names.

    Args:
        controller: ``cpu`` or ``memory``.
        listed: the list of this process's groups.
        root: where the hierarchies are mounted.
    """
    try:
        lines = listed.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        tops = [root, root / "unified"] if not controllers else [root / controller]
        if controllers and controller not in controllers.split(","):
            continue
        for top in tops:
            own = top / path.lstrip("/")
            yield [own, *(above for above in own.parents if top in (above, *above.parents))]
