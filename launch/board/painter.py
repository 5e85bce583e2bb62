"""Turns frames and messages into few bytes for a terminal: only what has changed is written.

The frame stands below the messages, which scroll away above it as ordinary output does. Nothing
of the terminal is changed that somebody would have to put back: no alternate screen, no scroll
region, no hidden cursor, no raw mode, and every piece of colour ends in a reset. So whatever ends
the process, SIGKILL included, leaves a terminal that works, with the cursor below the last frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

UP = "\x1b[{}A"
RIGHT = "\x1b[{}C"
ERASE_BELOW = "\x1b[J"
ERASE_RIGHT = "\x1b[K"
ERASE_ALL = "\x1b[H\x1b[2J"
NEAR = 6
"""Unchanged columns between two changes that cost less to write again than to jump over."""
KEPT = 200
"""Messages kept for a screen that is drawn anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One column."""

    char: str
    """A character of one column's width, or all that a wide one brings along."""
    style: Style
    """How it looks."""


Row = tuple[Cell, ...]
BLANK = Cell(char=" ", style=Style.null())


class Painter:
    """Knows what the terminal shows, and says what to write so that it shows something else."""

    def __init__(self, colours: ColorSystem | None) -> None:
        self._colours = colours
        self._rows: list[Row] = []
        self._columns = 0
        self._said: deque[str] = deque(maxlen=KEPT)

    def remember(self, messages: Sequence[str]) -> None:
        """Messages that were printed before the first frame."""
        self._said.extend(plain(line) for message in messages for line in message.split("\n"))

    def paint(self, lines: Sequence[Text], messages: Sequence[str], columns: int) -> str:
        """What to write.

        Args:
            lines: The frame, each narrower than the window.
            messages: New ones, for above it; each is told once.
            columns: Of the window.
        """
        rows = [_row(line) for line in lines]
        fresh = [plain(line) for message in messages for line in message.split("\n")]
        self._said.extend(fresh)
        same = len(rows) == len(self._rows) and columns == self._columns
        if not fresh and same and all(map(_comparable, rows, self._rows)):
            written = self._changes(rows)
        else:
            written = self._back() + "".join(f"{line}\r\n" for line in fresh) + self._whole(rows)
        self._rows, self._columns = rows, columns
        return written

    def anew(self, lines: Sequence[Text], columns: int, height: int) -> str:
        """Clears the window and draws all of it, with the latest messages that find room.

        For when nobody knows what the window shows: after a resize, where terminals wrap old
        lines each in its own way, or after something else has written to it.
        """
        rows = [_row(line) for line in lines]
        room = height - len(rows) - 1
        kept: list[str] = []
        for message in reversed(self._said):
            room -= max(1, -(-cell_len(message) // max(1, columns)))
            if room < 0:
                break
            kept.append(message)
        written = ERASE_ALL + "".join(f"{line}\r\n" for line in reversed(kept)) + self._whole(rows)
        self._rows, self._columns = rows, columns
        return written

    def _back(self) -> str:
        """To the frame's first line, erasing it."""
        if not self._rows:
            return ""
        return "\r" + UP.format(len(self._rows)) + ERASE_BELOW

    def _whole(self, rows: Sequence[Row]) -> str:
        return "".join(self._styled(row) + "\r\n" for row in rows)

    def _changes(self, rows: Sequence[Row]) -> str:
        """From below the frame and back to there, over what has changed."""
        written = []
        below = 0  # lines that the cursor is above its resting place
        for number in range(len(rows) - 1, -1, -1):
            old, new = self._rows[number], rows[number]
            if old == new:
                continue
            rise = len(rows) - number - below
            below += rise
            written.append("\r" + (UP.format(rise) if rise else "") + self._line(old, new))
        if not written:
            return ""
        return "".join(written) + "\r" + f"\x1b[{below}B"

    def _line(self, old: Row, new: Row) -> str:
        """From a line's first column on."""
        written = []
        at = 0
        for start, end in _spans(old, new):
            if start > at:
                written.append(RIGHT.format(start - at))
            written.append(self._styled(new[start:end]))
            at = end
        if len(new) < len(old):
            if len(new) > at:
                written.append(RIGHT.format(len(new) - at))
            written.append(ERASE_RIGHT)
        return "".join(written)

    def _styled(self, cells: Sequence[Cell]) -> str:
        written, at = [], 0
        while at < len(cells):
            style, start = cells[at].style, at
            while at < len(cells) and cells[at].style == style:
                at += 1
            text = "".join(cell.char for cell in cells[start:at])
            written.append(style.render(text, color_system=self._colours))
        return "".join(written)


def plain(text: str) -> str:
    """Text without control characters, which could move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text.expandtabs(4))


def _row(text: Text) -> Row:
    cells: list[Cell] = []
    styles = _styles(text)
    for char in plain(text.plain):
        style = next(styles)
        if cell_len(char) == 0 and cells:
            cells[-1] = Cell(char=cells[-1].char + char, style=cells[-1].style)
        else:
            cells.append(Cell(char=char, style=style))
    return tuple(cells)


def _styles(text: Text) -> Iterator[Style]:
    """Of every character."""
    found = [Style.null()] * len(text.plain)
    for span in text.spans:
        style = Style.parse(span.style) if isinstance(span.style, str) else span.style
        for at in range(max(0, span.start), min(span.end, len(found))):
            found[at] = found[at] + style
    return iter(found)


def _comparable(old: Row, new: Row) -> bool:
    """Whether a cell's place in the row is its column, in both."""
    return old == new or all(cell_len(cell.char) == 1 for row in (old, new) for cell in row)


def _spans(old: Row, new: Row) -> Iterator[tuple[int, int]]:
    """Half-open ranges of columns that differ, near ones joined."""
    start = end = -1
    for at, cell in enumerate(new):
        if cell == (old[at] if at < len(old) else BLANK):
            continue
        if start < 0:
            start = at
        elif at - end > NEAR:
            yield start, end
            start = at
        end = at + 1
    if start >= 0:
        yield start, end
