r"""What models, data sets, files and other hosts wrote, made fit to be looked at.

A terminal obeys control characters: ``\x1b[2J`` clears it, U+009B begins a command too, and U+202E
shows what follows backwards. Each of them is shown by its escape instead. Every text that a process
prints goes through here, as :func:`guard_output` stands before its standard streams; what
writes control characters on purpose (the live view) asks for the stream itself with :func:`raw`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

# Controls, except tabulator and line break; invisible and directional formats; line and paragraph
# separators; halves of surrogate pairs; tags and private variations.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u08e2\u115f\u1160\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def printable(text: str) -> str:
    r"""A text with each character that can't be seen written as its escape.

    >>> printable("a\x1b[2J\u202eb")
    'a\\u001b[2J\\u202eb'
    """
    return text if text.isprintable() else _HIDDEN.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    """As JSON has it, so that a JSON text stays one, with the same meaning."""
    code = ord(match.group())
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


class PrintableStream:
    """A text stream that shows what can't be seen; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        """The stream itself."""

    def write(self, text: str) -> int:
        """Writes a text; returns its length."""
        self.raw.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """The stream itself, for what moves the cursor on purpose."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


def guard_output() -> None:
    """From now on standard output and standard error show what can't be seen, tracebacks too."""
    sys.stdout = cast(TextIO, PrintableStream(raw(sys.stdout)))
    sys.stderr = cast(TextIO, PrintableStream(raw(sys.stderr)))
