"""The warm parent of the graders: imports math-verify once and forks graders in milliseconds.

Started by an exec of its own (``python -m tandem.reward.zygote``), so that no thread, ZeroMQ
context or Redis connection of the pool is inherited. It has one thread, grades nothing and holds
no secrets. Messages are MessagePack lists on sequenced-packet sockets, which keep their borders::

    pool -> zygote    ["spawn", slot] with one descriptor, ["kill", slot]
    zygote -> pool    ["ready", pid, [limits]], ["spawned", slot, pid], ["exited", slot, pid, status],
                      ["failed", why]
    pool -> grader    [answer, gold, cpu seconds]
    grader -> pool    ["ready"], [verdict, seconds, resident KiB], ["crash", traceback]

When the pool dies, its end of the control socket closes: the zygote kills and reaps its graders
and ends. When the zygote is killed, the kernel kills the graders (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

import msgpack

from ..common.errors import WireError
from .confinement import allow_cpu, confine_grader, confine_zygote, readable_by_others
from .pipes import read_control, read_request

MAX_MESSAGE = 1 << 18
EXIT_MEMORY = 3
EXIT_CRASH = 4
PARENT_CHECK_SECONDS = 2.0

Compare = Callable[[str, str], str]


def grade_for_ever(channel: socket.socket, compare: Compare, memory_bytes: int) -> None:
    """A grader: one request at a time, until its pool closes the socket or a limit ends it."""
    channel.send(msgpack.packb(["ready"]))
    while True:
        data = channel.recv(MAX_MESSAGE)
        if not data:
            return
        answer, gold, cpu_seconds = read_request(data)
        allow_cpu(cpu_seconds)
        start = time.perf_counter()
        try:
            verdict = compare(answer, gold)
        except MemoryError:
            os._exit(EXIT_MEMORY)
        except RecursionError:
            verdict = "unparsable"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if verdict != "correct" and peak * 1024 > 0.8 * memory_bytes:
            # math-verify swallows MemoryError; at the limit a "wrong" is no finding.
            os._exit(EXIT_MEMORY)
        channel.send(msgpack.packb([verdict, time.perf_counter() - start, peak]))


def _become_grader(channel: socket.socket, compare: Compare, memory_mb: int, drop: bool) -> None:
    """Runs in the forked child and never returns."""
    code = 0
    try:
        memory = memory_mb << 20
        confine_grader(memory, os.getppid(), drop_user=drop)
        grade_for_ever(channel, compare, memory)
    except (BrokenPipeError, ConnectionResetError):
        code = 0
    except BaseException:  # noqa: BLE001 - the child must never run on into the zygote's loop
        code = EXIT_CRASH
        try:
            channel.send(msgpack.packb(["crash", traceback.format_exc()[-4000:]]))
        except OSError:
            code = EXIT_CRASH
    finally:
        os._exit(code)


class Zygote:
    """Forks, kills and reaps graders as the pool asks."""

    def __init__(self, control: socket.socket, compare: Compare, memory_mb: int) -> None:
        self._control = control
        self._compare = compare
        self._memory_mb = memory_mb
        self._children: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        import sympy

        self._drop = readable_by_others(sympy.__file__) and readable_by_others(os.__file__)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)

    def run(self, parent: int) -> None:
        """Serves until the pool closes its end or is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            ready = dict(poller.poll(PARENT_CHECK_SECONDS * 1000))
            if os.getppid() != parent:
                break
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self._reap()
            if self._control.fileno() in ready and not self._serve():
                break
        self._end()

    def _say(self, *message: object) -> None:
        try:
            self._control.send(msgpack.packb(message))
        except (BrokenPipeError, ConnectionResetError):
            self._end()

    def _serve(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
        except ConnectionResetError:
            # The pool closed with messages of ours unread.
            return False
        if not data:
            return False
        try:
            kind, slot, *_ = read_control(data)
        except WireError:
            return False  # Whoever says that is no pool; ours starts another zygote.
        if kind == "spawn" and descriptors:
            self._spawn(slot, descriptors[0])
        elif kind == "kill":
            pid = self._slots.get(slot)
            # Not reaped yet, so the id can't be another process's.
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        return True

    def _spawn(self, slot: int, descriptor: int) -> None:
        channel = socket.socket(fileno=descriptor)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            _become_grader(channel, self._compare, self._memory_mb, self._drop)
        channel.close()
        self._children[pid] = slot
        self._slots[slot] = pid
        self._say("spawned", slot, pid)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = self._children.pop(pid, -1)
            self._slots.pop(slot, None)
            self._say("exited", slot, pid, os.waitstatus_to_exitcode(status))

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)
        os._exit(0)


def main(arguments: list[str]) -> int:
    """``zygote <control descriptor> <memory MiB> <pid of the pool>``."""
    control = socket.socket(fileno=int(arguments[0]))
    memory_mb, parent = int(arguments[1]), int(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = confine_zygote()
    try:
        from .symbolic import compare, warm_up

        warm_up()
    except ImportError as error:
        control.send(msgpack.packb(["failed", str(error)]))
        return 1
    gc.collect()
    # Kept out of collections for good: a collection in a child would copy every page.
    gc.freeze()
    try:
        control.send(msgpack.packb(["ready", os.getpid(), held]))
    except (BrokenPipeError, ConnectionResetError):
        return 0  # The pool has died meanwhile.
    Zygote(control, compare, memory_mb).run(parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
