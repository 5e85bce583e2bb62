"""The bar of a command that goes through a file's rows, on a real pty."""

from __future__ import annotations

import re
import sys

import pytest
from pty_screen import OnPty

# Each row is drawn, and the time that is left makes every line but the last one longer.
PROGRAM = """
import sys
from tandem.launch import progress
progress.DRAW_SECONDS = 0.0
bar = progress.Progress(sys.stderr, "graded", 100)
for _ in range(100):
    bar.add()
bar.end()
"""
DONE = f"graded 100/100 [{'#' * 24}] 100%"


@pytest.mark.parametrize("columns", [80, 50])
def test_the_bar_stays_in_its_line_and_leaves_nothing_of_longer_ones(columns: int) -> None:
    view = OnPty([sys.executable, "-c", PROGRAM], columns=columns, rows=10)
    try:
        assert view.wait() == 0
        first, *rest = view.lines()
        assert not any(rest)
        if columns == 80:
            assert b" s left" in view.raw
            assert re.fullmatch(re.escape(DONE) + r"  [\d,]+ rows/s", first)
        else:
            assert first.startswith(DONE)
            assert len(first) < columns
    finally:
        view.end()
