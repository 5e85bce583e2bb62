"""Tests of the cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.common import cores


def test_a_process_has_the_cores_that_it_may_run_on() -> None:
    allowed, bound = len(os.sched_getaffinity(0)), cores.quota()
    expected = allowed if bound is None else max(1, min(allowed, int(bound)))
    assert cores.usable_cores() == expected


@pytest.mark.parametrize(
    ("own", "files", "bound"),
    [
        # As a container sees itself.
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        # The smallest of its group's and of those above it.
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 50000"}, 1.0),
        # The other kind of control groups, on top of the first.
        ("4:memory:/x\n0::/a", {"unified/a/cpu.max": "400000 100000"}, 4.0),
        ("4:cpu:/x", {"cpu.max": "100000 100000"}, None),
    ],
)
def test_a_quota_of_the_control_groups_bounds_them(
    tmp_path: Path, own: str, files: dict[str, str], bound: float | None
) -> None:
    group = tmp_path / "cgroup"
    group.write_text(own + "\n")
    root = tmp_path / "fs"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    assert cores.quota(group, root) == bound


@pytest.mark.parametrize(("bound", "usable"), [(None, 4), (0.5, 1), (2.9, 2), (16.0, 4)])
def test_a_share_of_a_core_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, bound: float | None, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(cores, "quota", lambda: bound)
    assert cores.usable_cores() == usable
