"""Ranks that wait for what rank 0 does meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(300)


def test_signs_of_life_never_get_into_an_order(tmp_path: Path, many: ModuleType) -> None:
    many.start("rank_of_waits.py", 2, tmp_path, "orders")
