"""Runs one untrusted program: in namespaces of its own, under limits, and killed as a whole.

The program's process sees an empty network, its own process table, and a file system that holds
the Python that runs Tandem and the system's libraries, read-only, and an empty working folder in
memory: not the run's folder, not the home folder, not ``/proc``. Its environment is empty. The
processes are::

    runner -> keeper (makes the namespaces) -> process 1 in them -> program

The keeper ends with its runner, and process 1 with the keeper. Both run our code: a program may ask the
kernel not to end with its parent, or leave its session, but when process 1 ends, at the deadline or with
a runner that was killed, the kernel kills everything in its namespace.

:func:`find` tries three ways, in this order: namespaces as root, who then becomes another user;
namespaces within a user namespace; ``bwrap``. A way in which :data:`PROBE` reaches something that
it shouldn't is not used. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...common.confinement import die_with
from ...common.errors import ConfigError
from . import entering
from .entering import Limits
from .tree_memory import descendants, exceeds

MAX_OUTPUT = 1 << 20
"""Bytes of output that are read; a program that writes more is killed."""
LOOK_SECONDS = 0.01
"""Time between two checks of the memory that a program and all that it started take."""
PROBE = """
import os, socket, sys
def holds(truth, otherwise):
    if not truth:
        print(otherwise)
        raise SystemExit
holds(os.getuid() != 0, "a program is root in it")
holds(os.getpid() < 10, "a program sees other processes in it")
holds(not os.path.exists(sys.argv[1]), "a program sees files of ours in it")
holds(set(os.environ) <= {kept}, "a program has our environment in it")
import ctypes
libc = ctypes.CDLL(None)
beyond = [libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600), libc.unshare(0x10000000)]
holds(set(beyond) == {-1}, "a program gets memory that no limit counts in it")
with open("made", "w") as file:
    file.write("x")
try:
    socket.create_connection((sys.argv[2], int(sys.argv[3])), 2)
    print("a program reaches the network in it")
except OSError:
    print("boxed")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a program ended."""

    status: int
    """Exit status: 128 and the number of the signal if one ended the program; negative if its keeper was killed."""
    output: bytes
    """What it wrote to its standard output."""
    report: bytes
    """What the harness wrote to descriptor 3."""
    timed_out: bool
    """Whether it was killed at its deadline."""
    failure: str
    """Why the box couldn't be made, so that nothing was executed; empty if it was made."""


Enter = Callable[[list[str], Limits], None]
"""Called in the keeper: makes the box and executes a command in it. It never returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One way to run programs."""

    how: str
    """``namespaces (root)``, ``namespaces``, ``bubblewrap`` or ``none``."""
    enter: Enter

    def run(self, arguments: Sequence[str], given: bytes, task: bytes, limits: Limits) -> Ran:
        """Runs Python in the box.

        Args:
            arguments: arguments of the interpreter.
            given: standard input.
            task: content of descriptor 4, for the harness alone, which reports on descriptor 3.
            limits: limits of the program.

        Raises:
            OSError: this process has no descriptors or processes left.
        """
        stdin, stdout, report, begun = _file(given), os.pipe(), os.pipe(), os.pipe()
        token = _file(task)
        me = os.getpid()
        keeper = os.fork()
        if keeper == 0:
            try:
                os.setsid()
                die_with(me)
                null = os.open("/dev/null", os.O_WRONLY)
                _install({0: stdin, 1: stdout[1], 2: null, 3: report[1], 4: token, 5: begun[1]})
                os.set_inheritable(5, False)
                self.enter([sys.executable, *arguments], limits)
            except BaseException as error:  # noqa: BLE001 - it must never run on as a runner
                # No program can write there: executing one closes it.
                os.write(5, (str(error) or repr(error))[:200].encode("utf-8", "replace"))
            finally:
                os._exit(126)
        for descriptor in (stdin, stdout[1], report[1], token, begun[1]):
            os.close(descriptor)
        pipes = stdout[0], report[0], begun[0]
        try:
            return _watch(keeper, *pipes, limits, boxed=self.how != "none")
        finally:
            for descriptor in pipes:
                os.close(descriptor)


def _file(content: bytes) -> int:
    descriptor = os.memfd_create("given")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _install(wanted: dict[int, int]) -> None:
    """Moves descriptors to their numbers and closes all others."""
    # First to numbers above all of these, so that none overwrites another one's source.
    high = {number: os.dup2(source, 100 + number) for number, source in wanted.items()}
    for number, source in high.items():
        os.dup2(source, number)
    os.closerange(max(wanted) + 1, 4096)


def _watch(
    keeper: int, output: int, report: int, begun: int, limits: Limits, *, boxed: bool
) -> Ran:
    """Reads output until the program has ended. Kills it, with everything that it started, at its
    deadline and when all of it takes more memory than it may. ``begun`` ends when it is executed: until then
    it is a copy of this process, and shares its memory; it writes there why it can't be executed."""
    now = time.monotonic()
    end, next_look = now + limits.seconds, now
    read: dict[int, bytes] = {output: b"", report: b""}
    open_, begins = {output, report}, True
    timed_out = killed = False
    failure = b""
    while True:
        if open_:
            ready = select.select([*open_, *([begun] if begins else [])], [], [], LOOK_SECONDS)[0]
        else:
            # It has closed its pipes but lives on, or was killed.
            ready = []
            time.sleep(0.001)
        if begun in ready:
            chunk = os.read(begun, 1024)
            failure += chunk
            begins = bool(chunk)
            ready.remove(begun)
        for descriptor in ready:
            chunk = os.read(descriptor, 65536)
            read[descriptor] += chunk
            if not chunk:
                open_.discard(descriptor)
        pid, status = os.waitpid(keeper, os.WNOHANG) if not open_ else (0, 0)
        if pid:
            # Kills what it started in its session, outside a process namespace (``none``).
            _kill_group(keeper)
            break
        now = time.monotonic()
        if killed or now < next_look:
            continue
        next_look = now + LOOK_SECONDS
        timed_out = now > end
        # In a box, neither the keeper is one of the program's processes nor process 1, its first descendant.
        found = [] if begins else [keeper, *descendants(keeper)]
        program = found[2:] if boxed else found
        too_much = max(map(len, read.values())) > MAX_OUTPUT or exceeds(
            program, limits.memory_mb << 20
        )
        if timed_out or too_much:
            _kill(keeper)
            killed, open_ = True, set()
    if begins and select.select([begun], [], [], 0)[0]:
        # It has failed since the last look.
        failure += os.read(begun, 1024)
    return Ran(
        status=os.waitstatus_to_exitcode(status),
        output=read[output],
        report=read[report],
        timed_out=timed_out,
        failure=failure.decode("utf-8", "replace"),
    )


def _kill(keeper: int) -> None:
    # Found before the keeper ends, and with it the way to those that have left its session.
    below = descendants(keeper)
    _kill_group(keeper)
    for pid in (keeper, *below):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


WAYS = (
    Box(how="namespaces (root)", enter=entering.as_root),
    Box(how="namespaces", enter=entering.as_user),
    Box(how="bubblewrap", enter=entering.bubblewrap),
)


def find(wanted: str) -> Box:
    """The first way that works here and confines what it should.

    Args:
        wanted: ``auto``, ``namespaces``, ``bubblewrap``, or the sentence that asks for none.

    Raises:
        ConfigError: none works; says why for each.
    """
    if wanted.startswith("none"):
        return Box(how="none", enter=entering.unboxed)
    problems = []
    for box in WAYS:
        if wanted != "auto" and not box.how.startswith(wanted):
            continue
        problem = probe(box)
        if not problem:
            return box
        problems.append(f"{box.how}: {problem}")
    raise ConfigError(
        f"reward component code: no sandbox works here ({'; '.join(problems)}), and code that "
        f"a model wrote is never run outside one. Allow user namespaces "
        f"(sysctl kernel.unprivileged_userns_clone=1), install bubblewrap, or grade on another host"
    )


def probe(box: Box) -> str:
    """Why a way can't be used; empty if it confines what it should."""
    import socket
    import tempfile

    with socket.socket() as listener, tempfile.NamedTemporaryFile() as file:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        os.chmod(file.name, 0o644)
        program = PROBE.replace("{kept}", repr({*entering.environment(), "LC_CTYPE", "PWD"}))
        arguments = ["-I", "-c", program, file.name, "127.0.0.1", str(listener.getsockname()[1])]
        try:
            ran = box.run(arguments, b"", b"", Limits(seconds=20.0))
        except OSError as error:
            return str(error)
    if ran.output == b"boxed\n":
        return ""
    if ran.failure:
        return ran.failure
    return ran.output.decode("utf-8", "replace").strip() or f"it ended with status {ran.status}"
