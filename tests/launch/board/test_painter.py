"""Bytes for a terminal: after them an emulator shows the frame, below the messages."""

from __future__ import annotations

import re

import pyte
import pytest
from board_examples import KNOWN, record, snapshot
from rich.color import ColorSystem
from rich.text import Text

from tandem.launch.board.history import History
from tandem.launch.board.painter import Painter
from tandem.launch.board.snapshot import assemble
from tandem.launch.board.view import draw

COLUMNS, ROWS = 80, 24


class Shown:
    """A painter and the screen that it paints."""

    def __init__(self, columns: int = COLUMNS, colours: ColorSystem | None = ColorSystem.STANDARD):
        self.screen = pyte.Screen(columns, ROWS)
        self.stream = pyte.Stream(self.screen)
        self.painter = Painter(colours)
        self.columns = columns
        self.sizes: list[int] = []

    def paint(self, lines: list[Text], messages: tuple[str, ...] = ()) -> None:
        written = self.painter.paint(lines, messages, self.columns)
        self.sizes.append(len(written.encode()))
        self.stream.feed(written)

    def display(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]


def frame(*lines: str) -> list[Text]:
    return [Text(line) for line in lines]


@pytest.mark.parametrize("columns", [80, 120])
def test_frames_of_a_run_follow_each_other(columns: int) -> None:
    shown = Shown(columns)
    history = History()
    for step in range(1, 60):
        history.add(record(step))
        made = assemble(KNOWN, history, now=2000.0 + step)
        lines = draw(made, columns - 1)
        shown.paint(lines)
        expected = [line.plain.rstrip() for line in lines]
        assert shown.display()[: len(lines)] == expected
        assert (shown.screen.cursor.x, shown.screen.cursor.y) == (0, len(lines))
    later = shown.sizes[1:]
    assert sum(later) / len(later) < shown.sizes[0] / 4


def test_nothing_is_written_where_nothing_changed() -> None:
    shown = Shown()
    shown.paint(draw(snapshot(), 79))
    shown.paint(draw(snapshot(), 79))
    assert shown.sizes[1] == 0


def test_changed_columns_alone_are_written() -> None:
    shown = Shown()
    shown.paint(frame("a" * 60, "b" * 60))
    shown.paint(frame("a" * 30 + "X" + "a" * 29, "b" * 60))
    assert shown.display()[:2] == ["a" * 30 + "X" + "a" * 29, "b" * 60]
    assert shown.sizes[1] < 20


def test_a_line_that_grows_shorter_leaves_nothing_behind() -> None:
    shown = Shown()
    shown.paint(frame("one two three", "below"))
    shown.paint(frame("one", "below"))
    assert shown.display()[:2] == ["one", "below"]


def test_messages_stand_above_and_stay() -> None:
    shown = Shown()
    shown.paint(frame("frame"))
    shown.paint(frame("frame"), ("first", "second\nthird"))
    shown.paint(frame("frame 2"))
    assert shown.display()[:5] == ["first", "second", "third", "frame 2", ""]


def test_messages_scroll_away_above_the_frame() -> None:
    shown = Shown()
    for number in range(100):
        shown.paint(frame("frame", f"line {number}"), (f"message {number}",))
    display = shown.display()
    assert display[-3:] == ["frame", "line 99", ""]
    assert display[0] == "message 79"


def test_a_frame_may_grow_and_shrink() -> None:
    shown = Shown()
    for lines in (["a"], ["a", "b", "c"], ["c"], []):
        shown.paint(frame(*lines))
        assert [line for line in shown.display() if line] == lines


def test_a_message_cannot_move_the_cursor() -> None:
    shown = Shown()
    shown.paint(frame("frame"), ("evil\x1b[2J\r\x07 text",))
    assert shown.display()[:2] == ["evil [2J   text", "frame"]


def test_wide_characters_keep_their_columns() -> None:
    shown = Shown()
    shown.paint(frame("runs/模型 · step 1", "below"))
    shown.paint(frame("runs/模型 · step 2", "below"))
    text = "".join(shown.screen.buffer[0][column].data for column in range(80)).rstrip()
    assert text == "runs/模型 · step 2"
    assert shown.display()[1] == "below"


def test_after_a_resize_the_window_is_drawn_anew_with_the_latest_messages() -> None:
    shown = Shown()
    for number in range(30):
        shown.paint(draw(snapshot(), 79), (f"message {number} " + "x" * 50,))
    shown.screen.resize(ROWS, 40)
    lines = draw(snapshot(), 39, ROWS - 2)
    shown.stream.feed(shown.painter.anew(lines, 40, ROWS))
    display = shown.display()
    at = next(n for n, line in enumerate(display) if line.startswith("─ miniature"))
    assert display[at : at + len(lines)] == [line.plain.rstrip() for line in lines]
    assert all("message 2" in line or set(line) <= {"x"} for line in display[:at])
    shown.columns = 40
    shown.paint(lines)
    assert shown.sizes[-1] == 0


def test_every_colour_ends_in_a_reset_and_none_is_used_without_a_colour_system() -> None:
    coloured = Painter(ColorSystem.STANDARD).paint(draw(snapshot(), 79), [], 80)
    pieces = re.findall(r"\x1b\[([0-9;]*)m", coloured)
    assert pieces[1::2] == ["0"] * (len(pieces) // 2)
    assert "0" not in pieces[::2]
    assert "\x1b[" not in Painter(None).paint(draw(snapshot(), 79), [], 80)
