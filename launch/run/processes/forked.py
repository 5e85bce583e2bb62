"""Processes of a run that another one forks, and that its supervisor adopts.

On a CPU the learner and the workers of the torch engine load mostly the same libraries, which takes one
core for seconds. So while a run is prepared, the learner's process first loads what the workers need, forks
them, and then loads the rest of its own. It forks twice, and Linux hands an orphan to its nearest ancestor
that asks for it (``PR_SET_CHILD_SUBREAPER``, prctl(2)): the supervisor, whose child each worker is from then
on, as if it had started it itself. What isn't forked in time is started anew, as everywhere else.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from ....common.confinement import adopt_orphans, die_with

FORK_SECONDS = 120.0
"""What isn't forked this long after its forking process began is started anew."""
ADOPT_SECONDS = 10.0
"""How long a forked process waits to become an orphan, which is at once."""


class Forked:
    """A process that is forked by another one: what :class:`subprocess.Popen` is for one that is spawned."""

    def __init__(self, forks: Forks, name: str, stdin: BinaryIO) -> None:
        self._forks = forks
        self._name = name
        self.stdin: BinaryIO | None = stdin
        self.returncode: int | None = None

    def is_there(self) -> bool | None:
        """Whether it has been forked and adopted; None while that may still happen. Doesn't wait."""
        may_come = self._forks.may_come()
        return self._name in self._forks.pids or (None if may_come else False)

    @property
    def pid(self) -> int:
        """Its process id, once it is there."""
        return self._forks.pids[self._name]

    def let_go(self) -> None:
        """Ends it if it isn't there yet but still comes."""
        assert self.stdin is not None
        self.stdin.close()
        if self.is_there() is None:
            self._forks.close()

    def poll(self) -> int | None:
        """Reaps it if it has ended; returns its exit code (negative: signal), None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits for its end; raises :class:`subprocess.TimeoutExpired` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._name, timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has been reaped."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Forks:
    """The supervisor's end of processes that one process of the run is to fork.

    Each of them has a pipe as its standard input, and tells its process id through one that they share. They
    have all told, or never will, when nobody holds that pipe's other end any more.
    """

    def __init__(self, commands: Mapping[str, list[str]]) -> None:
        """Makes the pipes, and has orphans handed to this process.

        Args:
            commands: the command line of each, by its name.

        Raises:
            OSError: the system can't make pipes or hand over orphans.
        """
        self.pids: dict[str, int] = {}
        """Process ids of those that are there, by name."""
        if not adopt_orphans():
            raise OSError("this system hands orphans to nobody but init")
        self._deadline = time.monotonic() + FORK_SECONDS
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        self._rest = b""
        self._inputs: list[int] = []
        self._forks = []
        self.processes: dict[str, Forked] = {}
        """Those that are to be forked, by name."""
        for name, command in commands.items():
            read, write = os.pipe()
            self._inputs.append(read)
            self._forks.append({"name": name, "stdin": read, "command": command})
            self.processes[name] = Forked(self, name, os.fdopen(write, "wb"))

    def for_child(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """What the process is to be told that forks them, and the descriptors that it inherits."""
        told = {"supervisor": os.getpid(), "tell": self._tell, "forks": self._forks}
        return told, (self._tell, *self._inputs)

    def given(self) -> None:
        """Closes what the forking process has inherited by now."""
        for descriptor in (self._tell, *self._inputs):
            os.close(descriptor)

    def may_come(self) -> bool:
        """Whether one may still come; notes those that have. Doesn't wait."""
        while self._told >= 0:
            try:
                read = os.read(self._told, 4096)
            except BlockingIOError:
                if time.monotonic() < self._deadline:
                    return True
                read = b""
            *lines, self._rest = (self._rest + read).split(b"\n")
            for line in lines:
                told = json.loads(line)
                self.pids[told["name"]] = told["pid"]
            if not read:
                self.close()
        return False

    def close(self) -> None:
        """Ends the wait: what comes from now on ends by itself."""
        if self._told >= 0:
            os.close(self._told)
            self._told = -1
            adopt_orphans(False)


def fork(told: dict[str, Any]) -> BinaryIO | None:
    """Forks what the supervisor has told of, as often as it has; each of them has loaded what this process has.

    Args:
        told: what :meth:`Forks.for_child` has made.

    Returns:
        in a process that was forked its standard input, and None in the forking process.
    """
    inputs = [int(one["stdin"]) for one in told["forks"]]
    for one in told["forks"]:
        child = os.fork()
        if not child:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            return _forked(told, one, inputs, between)
        os.waitpid(child, 0)
    for descriptor in (told["tell"], *inputs):
        os.close(descriptor)
    return None


def _forked(
    told: dict[str, Any], one: dict[str, Any], inputs: Iterable[int], between: int
) -> BinaryIO:
    """Makes of this child of ``between``, which ends, a process that the supervisor takes for one of its own."""
    supervisor = int(told["supervisor"])
    try:
        os.setsid()
        deadline = time.monotonic() + ADOPT_SECONDS
        while os.getppid() == between and time.monotonic() < deadline:
            time.sleep(0.001)
        # It ends where it was handed to somebody else.
        die_with(supervisor)
        for descriptor in inputs:
            if descriptor != one["stdin"]:
                os.close(descriptor)
        os.dup2(one["stdin"], 0)
        os.close(one["stdin"])
        _show_as(one["command"])
        os.write(
            told["tell"], json.dumps({"name": one["name"], "pid": os.getpid()}).encode() + b"\n"
        )
        os.close(told["tell"])
    except BaseException:  # noqa: BLE001 - must not go on with what the forking process was about to do
        # A closed pipe: the supervisor has given up, and starts this process anew.
        os._exit(1)
    return os.fdopen(0, "rb", closefd=False)


def _show_as(command: list[str]) -> None:
    """Has ``ps`` show a command line, if it is no longer than this process's own."""
    with open("/proc/self/stat", "rb") as file:
        # proc(5): arg_start and arg_end are fields 48 and 49; the second field may hold spaces.
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[48 - 3]), int(fields[49 - 3])
    words = b"\0".join(os.fsencode(word) for word in command) + b"\0"
    if start and len(words) <= end - start:
        ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)
