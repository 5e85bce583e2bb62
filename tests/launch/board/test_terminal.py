"""The live view on a real pty, seen through a terminal emulator."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from board_examples import ALARM
from pty_screen import OnPty

from tandem.launch.board.terminal import BYTES_PER_SECOND, FRAME_SECONDS, Terminal

DRAWN = Path(__file__).parent / "drawn.py"
Start = Callable[..., OnPty]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.txt"
    path.write_text("1\n")
    return path


@pytest.fixture
def start(script: Path) -> Iterator[Start]:
    started: list[OnPty] = []

    def begin(columns: int = 80, rows: int = 24, **environment: str) -> OnPty:
        command = [sys.executable, str(DRAWN), str(script)]
        view = OnPty(command, columns=columns, rows=rows, environment=environment)
        started.append(view)
        return view

    yield begin
    for view in started:
        view.end()


def shows(*texts: str) -> Callable[[str], bool]:
    return lambda screen: all(text in screen for text in texts)


def tell(script: Path, step: int, *messages: str) -> None:
    """Replaces the script whole, so that its reader never sees half of one."""
    temporary = script.with_suffix(".new")
    temporary.write_text("\n".join([str(step), *messages]) + "\n")
    os.replace(temporary, script)


@pytest.mark.parametrize(
    ("columns", "other", "rows"),
    [(80, 120, 40), pytest.param(120, 60, 20, marks=pytest.mark.byhand)],
)
def test_a_resize_in_the_middle(
    start: Start, script: Path, columns: int, other: int, rows: int
) -> None:
    view = start(columns)
    view.await_text(shows("said before", " 1/250 ", "waits for learner: staleness"))
    tell(script, 2, "rollout-0 was killed")
    view.await_text(shows("rollout-0 was killed\n─ miniature", " 2/250 "))
    view.resize(other, rows)
    # Drawn anew: once, whole, and the messages again above it.
    view.await_text(lambda told: _whole(told, other))
    tell(script, 3, "rollout-0 was killed", "end")
    assert view.wait() == 0
    assert shows(" 3/250 ", "said after")(view.text())


def _whole(told: str, columns: int) -> bool:
    lines = told.splitlines()
    frame = lines[2:]
    return (
        lines[:2] == ["said before", "rollout-0 was killed"]
        and len(frame) > 1
        and len(frame[0]) == columns - 1
        and [line for line in lines if "miniature" in line] == frame[:1]
        and "restarts  1" in frame[-1]
    )


def test_a_low_window_keeps_the_step_and_the_messages(start: Start, script: Path) -> None:
    view = start(80, 10)
    text = view.await_text(shows(" 1/250 "))
    tell(script, 4, "said meanwhile")
    text = view.await_text(shows(" 4/250 ", "said meanwhile"))
    assert len(text.splitlines()) <= 9


def test_the_end_leaves_the_last_frame_and_a_sane_terminal(start: Start, script: Path) -> None:
    view = start()
    view.await_text(shows(" 1/250 "))
    tell(script, 9, "end")
    assert view.wait() == 0
    assert view.lines().index("said after") == view.cursor()[1] - 1
    assert " 9/250 " in view.text()
    for left_behind in (b"\x1b[?1049h", b"\x1b[?25l", b"\x1b[?47h"):
        assert left_behind not in view.raw


def test_kill_9_leaves_the_cursor_below_the_frame(start: Start) -> None:
    view = start()
    text = view.await_text(shows(" 1/250 ", "restarts"))
    os.kill(view.process.pid, signal.SIGKILL)
    assert view.wait() == -signal.SIGKILL
    assert view.cursor() == (0, len(text.splitlines()))
    assert not view.screen.cursor.hidden
    assert view.screen.cursor.attrs.fg == "default"


def test_enter_does_not_leave_half_a_frame(start: Start, script: Path) -> None:
    view = start()
    view.await_text(shows(" 1/250 "))
    view.type("qqq\n\n")
    tell(script, 5)
    text = view.await_text(
        lambda told: " 5/250 " in told and "qqq" not in told and told.count("─ miniature") == 1
    )
    assert text.startswith("said before\n─ miniature")


def test_no_color_means_no_colour(start: Start) -> None:
    view = start(NO_COLOR="1")
    view.await_text(shows(" 1/250 ", "restarts"))
    assert re.search(rb"\x1b\[[0-9;]*m", view.raw) is None


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_can_do_nothing_gets_lines(start: Start, script: Path, term: str) -> None:
    view = start(TERM=term)
    tell(script, 2, "one message", "end")
    assert view.wait() == 0
    assert view.text() == "said before\none message\nsaid after"
    assert b"\x1b" not in view.raw


def test_lines_follow_where_the_figures_cannot_be_read(start: Start, script: Path) -> None:
    view = start()
    view.await_text(shows(" 1/250 "))
    tell(script, 1, "unreadable")
    why = "PermissionError: [Errno 13] Permission denied: 'metrics.jsonl'"
    view.await_text(lambda text: why in text.replace("\n", ""))
    tell(script, 1, "unreadable", "one message", "end")
    assert view.wait() == 0
    assert shows("one message\n", "said after")(view.text())


def test_a_pipe_gets_lines(script: Path) -> None:
    tell(script, 2, "one message", "end")
    done = subprocess.run(
        [sys.executable, str(DRAWN), str(script)], capture_output=True, timeout=60, check=True
    )
    assert done.stdout == b"said before\none message\nsaid after\n"
    assert done.stderr == b""


def test_a_terminal_that_takes_nothing_holds_nobody_up(start: Start, script: Path) -> None:
    view = start()
    view.await_text(shows(" 1/250 "))
    view.type("\x13")  # Ctrl-S
    tell(script, 2, *(f"message {number}" for number in range(500)), "end")
    # It ends though nobody reads what it says, and what it said last is seen after Ctrl-Q.
    view.type("\x11")
    assert view.wait() == 0
    assert shows("message 499", "said after")(view.text())


def unread(program: str, *words: int) -> subprocess.Popen[bytes]:
    """A program whose lines nobody reads, unless the test does."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_an_output_that_takes_nothing_holds_nobody_up() -> None:
    program = (
        "import sys\n"
        "from tandem.common.disk import keep_streams\n"
        "from tandem.launch.board.terminal import Terminal\n"
        "keep_streams()\n"
        "terminal = Terminal(plain=True)\n"
        "for number in range(1000):\n"
        "    terminal.say(f'{number:0900}')\n"
        "print('went on', file=sys.stderr)\n"
    )
    # Nobody reads the pipe, as behind `| less`; it takes 64 KiB.
    with unread(program) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
        assert process.stderr.read() == b"went on\n"
        assert process.stdout.read().startswith(f"{0:0900}\n{1:0900}\n".encode())


def test_an_empty_line_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(plain=True)
    for line in ("first", "", "last"):
        terminal.say(line)
    assert capsys.readouterr().out == "first\n\nlast\n"


def test_lines_noted_by_several_threads_are_kept_once_each(tmp_path: Path) -> None:
    terminal = Terminal(plain=True)
    terminal.keep(tmp_path / "start.log")

    def note(name: str) -> None:
        for number in range(300):
            terminal.note(f"{name} {number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(note, "abcd"))
    kept = [line.split(" ", 1)[1] for line in (tmp_path / "start.log").read_text().splitlines()]
    assert sorted(kept) == sorted(f"{name} {number}" for name in "abcd" for number in range(300))


def test_lines_that_an_output_takes_late_are_printed_before_the_end() -> None:
    program = (
        "import fcntl, sys\n"
        "from tandem.common.disk import keep_streams\n"
        "from tandem.launch.board import lines\n"
        "from tandem.launch.board.terminal import Terminal\n"
        "keep_streams()\n"
        "fcntl.fcntl(sys.stdout, fcntl.F_SETPIPE_SZ, 4096)\n"
        "terminal = Terminal(plain=True)\n"
        "for number in range(300):\n"
        "    terminal.say(f'{number:0900}')\n"
        "lines.PATIENCE_SECONDS = 60.0\n"
        "print('went on', file=sys.stderr, flush=True)\n"
    )
    with unread(program) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline() == b"went on\n"
        lines = process.stdout.read().decode().splitlines()
    missing = next(line for line in lines if line.startswith("("))
    assert len(lines) - 1 + int(missing[1:].partition(" ")[0]) == 300
    assert lines[-1] == f"{299:0900}"


# `tandem start` of a run that ends with the code that is named, or fails.
UNREAD = """
import fcntl, sys
from tandem.common.errors import TandemError
from tandem.launch import cli
from tandem.launch.board import lines
from tandem.launch.run.several import stages

# Enough for the first lines alone.
fcntl.fcntl(sys.stdout, fcntl.F_SETPIPE_SZ, 4096)
lines.PATIENCE_SECONDS = 0.2


def run(preset, opening, terminal):
    for number in range(30):
        terminal.say(f"{number:0900}")
    print("went on", file=sys.stderr, flush=True)
    if sys.argv[1] == "1":
        raise TandemError("a part has failed")
    return int(sys.argv[1])


stages.run_job = run
sys.exit(cli.main(["start", "--plain", "run.dir=no-such-run"]))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_commands_last_lines_wait_for_their_reader(code: int) -> None:
    with unread(UNREAD, code) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline() == b"went on\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        lines = process.stdout.read().decode().splitlines()
        assert lines == [f"{number:0900}" for number in range(30)]
        assert process.wait(60) == code


def test_a_reader_that_goes_ends_the_wait_for_it() -> None:
    with unread(UNREAD, 0) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline() == b"went on\n"
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_ctrl_c_ends_the_wait_for_a_reader() -> None:
    with unread(UNREAD, 0) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"went on\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == b""


def test_a_command_that_was_stopped_waits_for_no_reader() -> None:
    with unread(UNREAD, 128 + signal.SIGTERM) as process:
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("columns", [pytest.param(80, marks=pytest.mark.byhand), 120])
def test_at_most_1000_bytes_a_second_are_drawn(start: Start, script: Path, columns: int) -> None:
    view = start(columns, 40)
    view.await_text(shows(" 1/250 ", "restarts"))
    frame, began = len(view.raw), time.monotonic()
    # Without the limit six frames would be drawn meanwhile.
    for step in range(2, 62):
        tell(script, step)
        time.sleep(0.05)
    allowed = BYTES_PER_SECOND * (time.monotonic() - began) + frame
    assert frame < len(view.raw) <= frame + allowed


def test_nothing_is_written_where_nothing_has_changed(start: Start, script: Path) -> None:
    view = start()
    view.await_text(shows(" 1/250 ", "restarts"))
    tell(script, 2)
    view.await_text(shows(" 2/250 ", "restarts"))
    written = len(view.raw)
    time.sleep(4 * FRAME_SECONDS)
    assert len(view.raw) == written


def test_messages_scroll_away_above_the_frame(start: Start, script: Path) -> None:
    view = start()
    view.await_text(shows(" 1/250 "))
    tell(script, 2, *(f"message {number}" for number in range(60)))
    text = view.await_text(shows("message 59\n─ miniature", " 2/250 ", "restarts"))
    assert text.splitlines()[0].startswith("message ")
    assert text.count("─ miniature") == 1


def test_a_message_cannot_move_the_cursor(start: Start, script: Path) -> None:
    view = start()
    view.await_text(shows(" 1/250 "))
    tell(script, 1, "evil\x1b[2J\x07 text")
    view.await_text(shows("said before\nevil\\u001b[2J\\u0007 text\n─ miniature"))


@pytest.mark.parametrize("keeps", ["", "tandem.common.disk.keep_streams()\n"])
def test_an_alarm_is_said_where_the_encoding_lacks_its_characters(keeps: str) -> None:
    program = (
        "import tandem.common.disk\n"
        "from tandem.common.printable import guard_output\n"
        "from tandem.launch.board.terminal import Terminal\n"
        f"guard_output()\n{keeps}"
        f"Terminal(plain=True).say({ALARM!a})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == ALARM.encode("ascii", "backslashreplace") + b"\n"
