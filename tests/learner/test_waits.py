"""What rank 0 does alone may take longer than the other ranks wait for one another."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(300)


def test_the_other_ranks_wait_for_what_rank_0_does_alone(tmp_path: Path, many: ModuleType) -> None:
    """It takes digests of a checkpoint, and makes the files of a model, each for longer than they wait for an order.

    Signs of life reach them meanwhile, and never get in between an order and what all ranks then do together.
    """
    many.start("rank_of_waits.py", 2, tmp_path, "orders", "checkpoint", "export-1", "export-3")
    for stage in (1, 3):
        assert (tmp_path / f"model-{stage}" / "model.safetensors").is_file()


def test_near_ranks_wait_for_the_files_of_far_ones(tmp_path: Path, many: ModuleType) -> None:
    many.start("rank_of_waits.py", 3, tmp_path, "far")
