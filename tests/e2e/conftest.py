"""Makes ``processes.py``, ``pty_screen.py`` and ``twins.py`` importable, whichever way pytest imports the tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, HERE.parent / "launch" / "board"):
    sys.path.insert(0, str(folder))
