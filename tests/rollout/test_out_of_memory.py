"""A token step that has too little memory, in a real process with a limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# In this folder.
from forked import Forked
from forked_targets import exhaust


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts all memory on Linux alone")
def test_the_engine_says_that_it_is_exhausted(forkserver: None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Forked(log, exhaust, 4000, 60)
    try:
        assert process.wait(110) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    said = log.read_text().splitlines()
    (error,) = (line for line in said if line.startswith("error: "))
    (told,) = (line for line in said if line.startswith("told: "))
    assert error != "error: None"
    assert told.startswith(
        "told: OutOfMemoryError ['keys and values', 'weights'] no memory is left for"
    )
