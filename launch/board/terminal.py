"""Where a run's supervisor reports what happens: plain lines, or a live view below them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ...common.disk import try_append
from ...common.printable import printable
from . import view
from .lines import Lines
from .tty import Tty, has_blocks, has_colour, silence, wants_live

if TYPE_CHECKING:
    from .snapshot import Snapshot

TICK_SECONDS = 0.25
"""Time between two checks for messages and for the window's size."""
FRAME_SECONDS = 0.5
"""Least time between two frames."""
BYTES_PER_SECOND = 1000
"""Most bytes drawn on average, which a 9,600 baud line can carry."""
AHEAD_SECONDS = 4.0
"""A message is shown at once unless recent output is ahead of that rate by more than this."""
KEPT = 200
"""Number of messages that are kept for redrawing a window."""
PAUSED_SECONDS = 3.0
"""A pause that takes this much too long was Ctrl-Z: others have written to the window."""
LAST_SECONDS = 2.0
"""How long the terminal may take to accept the last frame."""


class Terminal:
    """Prints lines; if the terminal goes away or takes nothing, that neither fails nor holds anybody up.

    Between :meth:`go_live` and :meth:`end_live` it draws a view below the lines, in a thread.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self.gone = False
        self.live = not plain and wants_live(sys.stdout)
        """Whether :meth:`go_live` will draw."""
        self._said: deque[str] = deque(maxlen=KEPT)
        self._log: Path | None = None
        self._unwritten: deque[str] = deque(maxlen=KEPT)
        self._writing = threading.Lock()
        self._screen: Screen | None = None
        self._handler = _Warnings(self.say)
        self._lines = Lines(self._lost)

    def keep(self, log: Path) -> None:
        """Also appends everything that is said to a file, since nobody may be reading here."""
        self._log = log
        self.note()

    def note(self, *lines: str) -> None:
        """Writes lines to that file only; lines that find no space there are written later."""
        now = time.strftime("%H:%M:%S")
        # The view's thread and those that warn write here too.
        with self._writing:
            self._unwritten += [f"{now} {printable(line)}\n" for line in lines]
            if self._log is None:
                return
            try:
                with open(self._log, "ab", buffering=0) as file:
                    while self._unwritten:
                        try_append(file, self._unwritten[0].encode("utf-8", "replace"))
                        self._unwritten.popleft()
            except OSError:
                pass  # The disk is full, or the folder has gone: the user has been told all the same.

    def say(self, line: str) -> None:
        """Prints a line at once, or with the view's next frame."""
        self.note(line)
        screen = self._screen
        if screen is not None and screen.say(line):
            return
        if self.gone:
            return
        self._said.append(line)
        self._lines.print(line)

    def go_live(self, look: Callable[[], Snapshot]) -> None:
        """Draws what ``look`` returns from now on; does nothing if that isn't possible."""
        if not self.live or self.gone or self._screen is not None:
            return
        try:
            self._screen = Screen(look, list(self._said), self._lost)
        except OSError as error:
            self.live = False
            self.say(f"no live view here ({error.strerror}), lines instead")
            return
        logging.getLogger().addHandler(self._handler)

    @property
    def drawing(self) -> bool:
        """Whether there is a view below the lines at the moment."""
        return self._screen is not None and not self._screen.over

    def end_live(self) -> None:
        """Draws once more and leaves the view standing above the lines that follow."""
        screen, self._screen = self._screen, None
        if screen is not None:
            logging.getLogger().removeHandler(self._handler)
            for line in screen.stop():
                self.say(line)

    def _lost(self) -> None:
        self.gone = True
        silence()


class _Warnings(logging.Handler):
    """Handles warnings, which would otherwise be written across the view."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


class Screen:
    """The thread that draws. Nothing that happens to it can hold up or end the run.

    The frame is below the messages, which scroll away above it as ordinary output does. Nothing of
    the terminal is changed that somebody would have to restore: no alternate screen, no hidden
    cursor, no raw mode. So whatever ends the process, SIGKILL included, leaves a terminal that
    works, with the cursor below the last frame.
    """

    def __init__(
        self, look: Callable[[], Snapshot], said: Sequence[str], lost: Callable[[], None]
    ) -> None:
        self.over = False
        """Whether drawing has ended."""
        self._look = look
        self._lost = lost
        self._said = deque((printable(line) for line in said), maxlen=KEPT)
        self._messages: deque[str] = deque()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._glyphs = view.UNICODE if has_blocks(sys.stdout) else view.ASCII
        self._tty = Tty(sys.stdout.fileno())
        self._size = self._tty.size()
        self._frame: list[Text] = []
        self._console = _Console(
            file=cast("IO[str]", self._tty),
            force_terminal=True,
            force_interactive=True,
            color_system="standard" if has_colour() else None,
        )
        self._live = Live(
            self,
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)
        self._thread.start()

    def say(self, line: str) -> bool:
        """Takes a message to show above the view; returns False if the view has ended."""
        with self._lock:
            if self.over:
                return False
            self._messages.append(line)
            return True

    def stop(self) -> list[str]:
        """Draws once more and ends; returns the messages that could no longer be shown."""
        self._end.set()
        # Waits as long as the terminal may take; a thread that hangs in it is left behind.
        self._thread.join(LAST_SECONDS + 2 * FRAME_SECONDS)
        return self._rest()

    def _rest(self) -> list[str]:
        with self._lock:
            self.over = True
            return list(self._messages)

    def _new_messages(self) -> list[str]:
        with self._lock:
            new = [printable(line) for line in self._messages]
            self._messages.clear()
        self._said.extend(new)
        return new

    def _run(self) -> None:
        try:
            self._draw_until_end()
        except OSError:
            self._rest()
            self._lost()
        except Exception as error:  # noqa: BLE001 - whatever breaks the view must not break the run
            rest = self._rest()
            why = error.__cause__ or error
            ended = f"the live view has ended ({type(why).__name__}: {why}); lines from here on"
            try:
                print("\n".join([*rest, ended]), flush=True)
            except OSError:
                self._lost()
        finally:
            self._tty.close()

    def _draw_until_end(self) -> None:
        self._live.start()
        anew = False
        due = ticked = time.monotonic()
        while not self._end.wait(TICK_SECONDS):
            now = time.monotonic()
            before, self._size = self._size, self._tty.size()
            resized = self._size != before
            # Something else has written to the window, or the terminal has wrapped it its own way:
            # somebody pressed Ctrl-Z, or Enter, which has moved the cursor.
            anew |= now - ticked > PAUSED_SECONDS or self._tty.typed() or resized
            ticked = now
            if not self._tty.foreground():
                anew = True
                self._tty.write("".join(f"{line}\n" for line in self._new_messages()))
                self._tty.flush()
            elif (
                self._tty.flush() and not resized
            ):  # While the window's edge is dragged, nothing is drawn.
                ahead = AHEAD_SECONDS if self._messages else 0.0
                if now >= due - ahead:
                    written = self._tty.written
                    self._draw(anew)
                    anew = False
                    spent = (self._tty.written - written) / BYTES_PER_SECOND
                    due = max(due, now) + max(FRAME_SECONDS, spent)
        if self._tty.foreground() and self._tty.flush(LAST_SECONDS):
            self._draw(anew)
            self._live.stop()
            self._tty.flush(LAST_SECONDS)

    def _draw(self, anew: bool) -> None:
        """Writes what is new, or redraws the whole window with the latest messages that fit."""
        columns, rows = self._size
        self._console.size = ConsoleDimensions(columns, rows)
        # The last column stays free (terminals wrap at different points), and one row for the cursor.
        frame = view.draw(self._snapshot(), max(1, columns - 1), max(1, rows - 2), self._glyphs)
        messages = self._new_messages()
        if not anew and not messages and frame == self._frame:
            return
        self._frame = frame
        if anew:
            self._console.clear()
            messages = self._latest(rows - len(frame) - 1)
        if messages:
            self._console.print(Text("\n".join(messages)), soft_wrap=True)
        else:
            self._live.refresh()

    def _snapshot(self) -> Snapshot:
        """What there is to draw.

        Raises:
            RuntimeError: a file can't be read, which says nothing about the terminal.
        """
        try:
            return self._look()
        except OSError as error:
            raise RuntimeError("a file of the run can't be read") from error

    def _latest(self, room: int) -> list[str]:
        """The latest messages that fit into this many rows."""
        kept: list[str] = []
        for message in reversed(self._said):
            for line in message.split("\n"):
                room -= max(1, -(-cell_len(line) // self._size[0]))
            if room < 0:
                break
            kept.insert(0, message)
        return kept

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The frame, followed by an empty line for the cursor if more frames will come."""
        yield from self._frame
        if not self._end.is_set():
            yield Text()


class _Console(Console):
    """A console that never hides the cursor, which a killed process couldn't show again."""

    def show_cursor(self, show: bool = True) -> bool:
        """Does nothing."""
        return False
