"""Runs a sweep: its runs as child processes, one after another or side by side.

Each is an ordinary run, so that it is resumed, watched and looked at like any other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ....common import disk
from ....common.errors import DataError
from ....common.run_folder import RunFolder
from ....common.waiting import Wait
from ...board.lines import await_reader
from ...board.terminal import Terminal
from ...host.folder_lock import FolderLock, supervisor_of
from ...host.redis_server import PASSWORD_NOTE, PASSWORD_VARIABLE
from ...plan.hardware import GpuName
from ...wording import shown
from ..ending import was_stopped
from ..processes.parts import described, last_lines, seeing
from .sweep import Member, Sweep, accuracy, table, wall_time, write

LOOK_SECONDS = 0.2
"""Time between two looks at the runs that are under way."""
EARLIER_SECONDS = 300.0
"""How long runs that an earlier sweep has left behind may take to end before theirs are tried."""


def run_sweep(sweep: Sweep, *, jobs: int) -> int:
    """Runs what isn't finished, and returns the exit code: 1 if a run failed or was stopped.

    Raises:
        TandemError: another process runs this sweep.
    """
    disk.keep_streams()
    terminal = Terminal(plain=True)
    sweep.out.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(RunFolder(sweep.out), "--out DIR")
    lock.take()
    runs = _Runs(sweep, jobs, terminal)
    try:
        stopped_by = runs.run()
    finally:
        lock.release()
    lines = table(sweep)
    for line in ["", *lines, ""]:
        terminal.say(line)
    written = f"written to {shown(sweep.out / 'sweep.md')} and sweep.json"
    terminal.say(str(runs.unwritten or written))
    if stopped_by:
        terminal.say("stopped; the same command goes on")
        return 128 + stopped_by
    failed = [member for member in sweep.members if member.state == "failed"]
    if failed:
        terminal.say(
            f"{len(failed)} of {len(sweep.members)} runs failed; the same command tries again"
        )
        for member in failed:
            terminal.say(f"  {shown(member.folder.path)}: {member.error}")
    stopped = sum(member.state == "stopped" for member in sweep.members)
    if stopped:
        terminal.say(
            f"{stopped} of {len(sweep.members)} runs were stopped; the same command resumes them"
        )
    await_reader()
    return 1 if failed or stopped else 0


class _Runs:
    """The runs of a sweep, as child processes."""

    def __init__(self, sweep: Sweep, jobs: int, terminal: Terminal) -> None:
        self._sweep = sweep
        self._jobs = jobs
        self._say = terminal.say
        self._waiting = [one for one in sweep.members if one.state != "finished"]
        self._running: list[Member] = []
        self._signals: list[int] = []
        self.unwritten: disk.DiskFull | None = None
        """Why the table couldn't be written when that was tried last."""

    def run(self) -> int:
        """Runs them all; returns the signal that stopped it, or 0."""
        members = self._sweep.members
        done = len(members) - len(self._waiting)
        self._say(
            f"{len(members)} runs in {shown(self._sweep.out)}"
            f"{f', of which {done} are finished' if done else ''}"
        )
        if self._sweep.password is not None:
            self._say(PASSWORD_NOTE)
        write(self._sweep)
        forwarded = 0
        with self._heeding():
            self._await_earlier()
            while self._running or (self._waiting and not self._signals):
                while not self._signals and self._may_start():
                    self._start(self._waiting.pop(0))
                for number in self._signals[forwarded:]:
                    self._stop(number)
                    forwarded += 1
                time.sleep(LOOK_SECONDS)
                for member in self._running[:]:
                    self._look_at(member)
        return self._signals[0] if self._signals else 0

    @contextmanager
    def _heeding(self) -> Iterator[None]:
        """Notes signals; whatever happens, no run is left behind."""
        old = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # Under nohup it outlives its terminal.
            old[number] = signal.signal(number, lambda seen, _: self._heed(seen))
        try:
            yield
        finally:
            for member in self._running:
                assert member.process is not None
                member.process.terminate()
            for number, handler in old.items():
                signal.signal(number, handler)

    def _heed(self, number: int) -> None:
        self._signals.append(number)
        disk.stop_waiting()

    def _write(self) -> None:
        """Writes the table; where a signal has ended the wait for space, the runs are still to be drained."""
        try:
            write(self._sweep)
            self.unwritten = None
        except disk.DiskFull as error:
            if not self._signals:
                raise
            self.unwritten = error

    def _await_earlier(self) -> None:
        """Waits for the end of runs that other processes have, so that nothing is started beside them.

        A sweep that was killed leaves its runs behind, which checkpoint before they end.
        """
        wait = Wait("", "end", EARLIER_SECONDS)
        told = False
        while not self._signals:
            pids = {one.name: supervisor_of(one.folder) for one in self._waiting}
            wait.who = ", ".join(f"{name} (process {pid})" for name, pid in pids.items() if pid)
            if not wait.who or wait.expired(self._say):
                return
            if not told:
                first = next(one for one in self._waiting if pids[one.name])
                self._say(
                    f"waiting for the end of what an earlier start has left, for at most {wait.seconds:.0f} s: "
                    f"{wait.who}; to end one now: `tandem stop {shown(first.folder.path)}`"
                )
                told = True
            time.sleep(LOOK_SECONDS)

    def _may_start(self) -> bool:
        """Whether there is a next run, fewer than ``jobs`` are under way, and its GPUs are free."""
        if not self._waiting or len(self._running) >= self._jobs:
            return False
        return self._waiting[0].gpus <= len(self._free())

    def _free(self) -> list[GpuName]:
        """The GPUs that no run has."""
        taken = {gpu for member in self._running for gpu in member.seen}
        return [gpu for gpu in self._sweep.gpus if gpu not in taken]

    def _start(self, member: Member) -> None:
        environment = dict(os.environ)
        if member.gpus:
            # Each run begins at the first GPU that it sees.
            member.seen = tuple(self._free()[: member.gpus])
            environment |= seeing(member.seen)
        if self._sweep.password is not None:
            environment[PASSWORD_VARIABLE] = self._sweep.password
        with open(member.log, "ab") as log:
            member.process = subprocess.Popen(
                # It is asked to stop when this process is killed.
                [
                    *(sys.executable, "-P", "-m", "tandem.launch.lifeline", str(os.getpid())),
                    *("exec", sys.executable, "-P", "-m", "tandem.launch.cli"),
                    *(*member.words, "--plain"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C in the terminal reaches this process alone.
                start_new_session=True,
            )
        verb = "resumes" if member.state == "stopped" else "starts"
        number = self._sweep.members.index(member) + 1
        member.state = "running"
        self._running.append(member)
        self._say(f"{number}/{len(self._sweep.members)} {member.name} {verb}")

    def _stop(self, number: int) -> None:
        again = len(self._signals) > 1
        name = signal.Signals(number).name
        what = "are stopped at once" if again else "drain and checkpoint (once more: stop at once)"
        self._say(f"{name}: {len(self._running)} runs {what}")
        for member in self._running:
            assert member.process is not None
            member.process.terminate()

    def _look_at(self, member: Member) -> None:
        assert member.process is not None
        code = member.process.poll()
        if code is None:
            return
        self._running.remove(member)
        if code == 0 or (was_stopped(code) and _is_finished(member.folder)):
            member.state = "finished"
            self._say(f"{member.name} {accuracy([member])}, {wall_time([member])}")
        elif self._signals or was_stopped(code):
            member.state = "stopped"
            if not self._signals:
                self._say(f"{member.name} was stopped")
        else:
            member.state = "failed"
            last = last_lines(member.log, 1).strip().removeprefix("| ").removeprefix("tandem: ")
            member.error = f"{described(code)}: {last}"
            self._say(f"{member.name} {member.error}")
        self._write()


def _is_finished(folder: RunFolder) -> bool:
    """Whether a run is over, so that the signal that has ended it cut only its report short."""
    try:
        return folder.read_run().get("state") == "finished"
    except DataError:
        return False  # The next start of the sweep tells what is damaged.
