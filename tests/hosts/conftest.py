"""Makes the files beside the tests importable, whichever way pytest imports these."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
sys.path[:0] = [
    str(HERE),
    str(TESTS / "faults"),
    str(TESTS / "e2e"),
    str(TESTS / "launch" / "board"),
]
