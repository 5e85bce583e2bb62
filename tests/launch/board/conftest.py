"""Makes ``board_examples.py`` importable, whichever way pytest imports the tests beside it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
