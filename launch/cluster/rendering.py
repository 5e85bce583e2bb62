"""Fills templates: ``@name@`` is replaced by its value, and a line with a value of None is left out.

There is nothing else to learn: the templates are what is written, to be read and edited by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.errors import DataError

TEMPLATES = Path(__file__).resolve().parent.parent
"""The folder whose ``slurm/``, ``kubernetes/`` and ``skypilot/`` hold the templates."""
_PLACE = re.compile(r"@([a-z_]+)@")

Values = Mapping[str, str | int | None]


def fill(text: str, values: Values, name: str) -> str:
    """A template's text with its values.

    >>> fill("a: @one@\\nb: @two@\\n", {"one": 1, "two": None}, "example")
    'a: 1\\n'

    Raises:
        DataError: the template has a place for which there is no value.
    """
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        places = _PLACE.findall(line)
        if unknown := [place for place in places if place not in values]:
            raise DataError(
                f"{name} line {number} has @{unknown[0]}@, which is none of {', '.join(sorted(values))}"
            )
        if all(values[place] is not None for place in places):
            filled = _PLACE.sub(lambda found: str(values[found[1]]), line)
            lines.append(filled.rstrip() + "\n")
    return "".join(lines)


def quoted(value: Any) -> str:
    """A text, or lists and mappings of texts and numbers, in the words that JSON and all readers of YAML share.

    JSON's own escapes for characters beyond U+FFFF, two halves each, are refused by kubectl; other characters as they are
    may be refused or folded.
    """

    def escaped(found: re.Match[str]) -> str:
        code = ord(found[0])
        return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

    return re.sub(r"[^\x20-\x7e]", escaped, json.dumps(value, ensure_ascii=False))


def render(name: str, values: Values, folder: Path | None = None) -> str:
    """Fills a template, such as ``slurm/head.sbatch``.

    Args:
        name: the template's path below :data:`TEMPLATES`.
        values: what its places stand for.
        folder: a folder of the user's own templates, whose files of the same name go before.

    Raises:
        DataError: it can't be read, or has a place for which there is no value.
    """
    path = TEMPLATES / name
    if folder is not None and (folder / path.name).exists():
        path = folder / path.name
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the template {path} can't be read: {error.strerror}") from None
    return fill(text, values, str(path))
