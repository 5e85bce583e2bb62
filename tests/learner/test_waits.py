"""What one rank does alone may take longer than the other ranks wait for one another."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.timeout(300)
def test_the_other_ranks_wait_for_what_one_does_alone(tmp_path: Path, many: ModuleType) -> None:
    """Rank 0 takes digests of a checkpoint, makes the files of a model, and moves files of a rank that is far away,
    which waited for room on its disk: each for longer than the others wait for an order.

    Signs of life reach them meanwhile, and never get in between an order and what all ranks then do together.
    """
    many.start_together(
        "rank_of_waits.py",
        # They do hardly anything but wait, and so do it at the same time.
        (2, tmp_path, "orders", "checkpoint"),
        (2, tmp_path, "export-1", "export-3"),
        (3, tmp_path, "far"),
    )
    for stage in (1, 3):
        assert (tmp_path / f"model-{stage}" / "model.safetensors").is_file()
