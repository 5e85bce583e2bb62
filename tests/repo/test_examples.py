"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("common", "replay", "reward", "rollout", "learner", "launch")
WITH_EXAMPLES = sorted(
    path.relative_to(ROOT)
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_there_are_examples_in_every_room() -> None:
    assert {path.parts[0] for path in WITH_EXAMPLES} == set(ROOMS)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples_are_right(path: Path) -> None:
    parts = ("tandem", *path.with_suffix("").parts)
    name = ".".join(parts).removesuffix(".__init__")
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
