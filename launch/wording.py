"""How bytes, seconds, paths and near misses are written for a person."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..common.errors import ConfigError


def human(count: float) -> str:
    """A number of bytes with its unit.

    >>> human(3 << 29)
    '1.5 GB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} TB"


def duration(seconds: float) -> str:
    """Seconds as minutes or hours.

    >>> duration(75)
    '1:15'
    >>> duration(3700)
    '1:01:40'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def shown(path: Path) -> str:
    """A path as a user in the working directory would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def shown_folder(path: Path) -> str:
    """``run.dir=PATH``, quoted where YAML would read another value than the path.

    >>> shown_folder(Path("runs/mine"))
    'run.dir=runs/mine'
    >>> shown_folder(Path("[mine]/é"))
    'run.dir="[mine]/é"'
    """
    from ..common.config import parse_override

    word = f"run.dir={shown(path)}"
    try:
        plain = parse_override(word)[1] == shown(path)
    except ConfigError:
        plain = False
    return word if plain else f"run.dir={json.dumps(shown(path), ensure_ascii=False)}"


def shown_python() -> str:
    """This interpreter as a user in the working directory would type it."""
    return shown(Path(sys.executable))


def shown_tandem() -> str:
    """The ``tandem`` of this environment as a user in the working directory would type it."""
    beside = Path(sys.executable).with_name("tandem")
    on_path = shutil.which("tandem")
    if on_path is not None and (not beside.exists() or Path(on_path).samefile(beside)):
        return "tandem"
    return str(Path(shown_python()).with_name("tandem"))


def nearest(word: str, valid: Sequence[str]) -> str:
    """`` (did you mean …?)``, or all valid words if none is close."""
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else f" (there are: {', '.join(valid)})"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text, a line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return ["  ".join(line).rstrip() for line in lines]
