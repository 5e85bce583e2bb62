r"""Makes text from models, data sets, files and other hosts safe to display.

A terminal obeys control characters: ``\x1b[2J`` clears it, U+009B also begins a command, and U+202E
shows what follows backwards. Each of them is shown by its escape instead. Every text that a process
prints goes through here, since :func:`guard_output` wraps its standard streams; code that writes
control characters on purpose (the live view) gets the underlying stream from :func:`raw`.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

# Controls, except tabulator and line break; invisible and directional formats; line and paragraph
# separators; halves of surrogate pairs; tags and private variations.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u08e2\u115f\u1160\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def printable(text: str) -> str:
    r"""A text with each invisible character written as its escape.

    >>> printable("a\x1b[2J\u202eb")
    'a\\u001b[2J\\u202eb'
    """
    return text if text.isprintable() else _HIDDEN.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    """The escape as JSON has it, so that JSON text stays JSON with the same meaning."""
    code = ord(match.group())
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


class PrintableStream:
    """A text stream that escapes invisible characters and is otherwise the underlying stream."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        """The underlying stream."""

    def write(self, text: str) -> int:
        """Writes a text; returns its length."""
        self.raw.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """The underlying stream, for code that moves the cursor on purpose."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


def guard_output() -> None:
    """Makes standard output and standard error escape invisible characters, also in tracebacks, and those that
    their encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # It was closed before the start, as by `>&-`.
            null = open(os.devnull, "w")  # noqa: SIM115
            # Kept here too, as Python does, or its descriptor is closed once another stream takes its place.
            setattr(sys, f"__{name}__", null)
            setattr(sys, name, null)
        stream = raw(getattr(sys, name))
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, PrintableStream(stream))
