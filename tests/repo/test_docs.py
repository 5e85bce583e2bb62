"""The marked blocks of docs/ are run as they stand; see :mod:`test_readme`."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import (
    BLOCK_DEADLINE_S,
    FINISHED_RUN_S,
    ROOT,
    Block,
    blocks,
    place,
    run,
    run_after_run,
    sandbox,
)

ALL = [block for page in sorted((ROOT / "docs").rglob("*.md")) for block in blocks(page)]


@pytest.mark.timeout(BLOCK_DEADLINE_S + 60)
@pytest.mark.parametrize("block", [one for one in ALL if one.mark == "run"], ids=place)
def test_a_marked_block_runs(block: Block, tmp_path: Path) -> None:
    run(block, sandbox(tmp_path))


@pytest.mark.timeout(FINISHED_RUN_S + BLOCK_DEADLINE_S)
@pytest.mark.parametrize("block", [one for one in ALL if one.mark == "run after-run"], ids=place)
def test_a_block_for_a_finished_run_runs(block: Block, tmp_path: Path, finished_run: Path) -> None:
    run_after_run(block, tmp_path, finished_run)
