"""The warm parent of the graders: imports what they need once and forks them in milliseconds.

It is started by its own exec (``python -m tandem.reward.graders.zygote``), so that it inherits no thread,
ZeroMQ context or Redis connection of the pool. It has one thread, grades nothing and holds no
secrets. Messages are MessagePack lists on sequenced-packet sockets, which preserve message boundaries::

    pool -> zygote    ["spawn", slot] with one descriptor, ["kill", slot]
    zygote -> pool    ["ready", pid, [limits]], ["spawned", slot, pid], ["exited", slot, pid, status],
                      ["failed", why], ["refused", why] (another attempt would end as this one)
    pool -> grader    [kind, deadline, payload] (a long payload in a memory file)
    grader -> pool    ["ready", null, resident KiB], ["done", result, resident KiB],
                      ["raised", traceback, resident KiB], ["crash", traceback, 0]

Each kind of request has a handler: ``compare`` (:mod:`tandem.reward.answers.symbolic`), ``function`` (a
user's own, :mod:`tandem.reward.graders.user_functions`) and, in a separate zygote, ``code``
(:mod:`tandem.reward.sandbox.code_runner`).

When the pool dies, its end of the control socket closes: the zygote kills and reaps its graders
and ends. When the zygote is killed, the kernel kills the graders (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...common.confinement import can_drop_user, readable_by_others
from ...common.errors import TandemError, WireError
from ..sandbox.confinement import (
    allow_cpu,
    confine_grader,
    confine_runner,
    confine_zygote,
)
from .pipes import (
    MAX_MESSAGE,
    PACKET_BYTES,
    Crash,
    Done,
    Exited,
    Failed,
    Idle,
    Kill,
    Message,
    Part,
    Raised,
    Ready,
    Refused,
    Spawn,
    Spawned,
    read_control,
    read_payload,
    read_request,
)

# Statuses with which no function's own `os._exit` is likely to end a grader.
EXIT_MEMORY = 113
EXIT_CRASH = 114
PARENT_CHECK_SECONDS = 2.0

Handler = Callable[..., Any]
"""Takes a payload and returns a result of plain data."""


@dataclass(slots=True, kw_only=True)
class Trade:
    """What the graders of one zygote can do, and how they are confined."""

    handlers: dict[str, Handler] = field(default_factory=dict)
    """Kind of request to its handler."""
    files: list[str] = field(default_factory=list)
    """Files that a grader may have to read; if any user may read them, root's grader becomes one without rights."""
    memory_mb: int = 1024
    """Address-space limit of a grader, MiB."""
    about: str = ""
    """What confines the programs that it runs, in words."""
    runs_code: bool = False
    """Whether its graders start sandboxes. They are then less confined, but run no code themselves."""


def grade_for_ever(channel: socket.socket, trade: Trade) -> None:
    """Runs a grader: one request at a time, until its pool closes the socket or a limit ends it."""
    own = os.getpid()
    channel.send(Idle(None, _peak_kib()).pack())
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 1)
        if not data:
            return
        request = read_request(data)
        kind, packed = request.kind, request.payload
        payload = read_payload(kind, packed if packed is not None else _read(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        if not trade.runs_code:
            allow_cpu(request.seconds)
        try:
            result = trade.handlers[kind](*payload)
            raised = ""
        except MemoryError:
            os._exit(EXIT_MEMORY)
        except BaseException as error:
            if kind != "function":
                raise
            # A user's function may raise anything, and the grader must go on.
            result, raised = None, _from_the_function_on(error)
        if os.getpid() != own:
            # The function has forked: a second answer would be taken for the next request's.
            os._exit(0)
        peak = _peak_kib()
        if kind == "compare" and result != "correct" and peak > 0.8 * 1024 * trade.memory_mb:
            # math-verify swallows MemoryError, so at the limit its "wrong" means nothing.
            os._exit(EXIT_MEMORY)
        _answer(channel, Raised(raised, peak) if raised else Done(result, peak))


def _from_the_function_on(error: BaseException) -> str:
    """The end of an exception's traceback, without the frames that lead to the user's function: where the fault is what
    it returned, only the error is left."""
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        step = one.__traceback__
        while step is not None:
            if step.tb_frame.f_globals.get("__package__") == __package__:
                one.__traceback__ = step.tb_next
            step = step.tb_next
        one = one.__cause__ or one.__context__
    return "".join(traceback.format_exception(error))[-4000:]


def _answer(channel: socket.socket, message: Message) -> None:
    """Sends a reply, in parts if it is too long for one packet."""
    data = message.pack()
    if len(data) <= PACKET_BYTES:
        channel.send(data)
        return
    for start in range(0, len(data), PACKET_BYTES):
        end = start + PACKET_BYTES
        channel.send(Part(data[start:end], end >= len(data)).pack())


def _read(descriptors: list[int]) -> bytes:
    """Content of the memory file that came along; empty if there was none."""
    if not descriptors:
        return b""
    with open(descriptors[0], "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _become_grader(channel: socket.socket, trade: Trade, drop: bool) -> None:
    """Runs in the forked child and never returns."""
    code = 0
    try:
        if not trade.runs_code:
            # No file may grow, so that a word to a log of the pool would be an error of the function.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
        # Of its own, so that what a function starts ends with its grader.
        os.setpgid(0, 0)
        if trade.runs_code:
            confine_runner(os.getppid())
        else:
            confine_grader(trade.memory_mb << 20, os.getppid(), drop=drop)
        grade_for_ever(channel, trade)
    except (BrokenPipeError, ConnectionResetError):
        code = 0
    except BaseException:  # noqa: BLE001 - the child must never run on into the zygote's loop
        code = EXIT_CRASH
        try:
            channel.send(Crash(traceback.format_exc()[-4000:], 0).pack())
        except OSError:
            code = EXIT_CRASH
    finally:
        os._exit(code)


class Zygote:
    """Forks, kills and reaps graders as the pool asks."""

    def __init__(self, control: socket.socket, trade: Trade) -> None:
        self._control = control
        self._trade = trade
        self._children: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        files = [os.__file__, *trade.files]
        self._drop = all(map(readable_by_others, files)) and can_drop_user()
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

    def _say(self, message: Message) -> None:
        try:
            self._control.send(message.pack())
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
            message = read_control(data)
        except WireError:
            return False  # Only something other than our pool sends this; ours will start another zygote.
        if isinstance(message, Spawn) and descriptors:
            self._spawn(message.slot, descriptors[0])
        elif isinstance(message, Kill):
            pid = self._slots.get(message.slot)
            # It isn't reaped yet, so the id can't be another process's.
            if pid is not None:
                _kill(pid)
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
            _become_grader(channel, self._trade, self._drop)
        channel.close()
        self._children[pid] = slot
        self._slots[slot] = pid
        self._say(Spawned(slot, pid))

    def _reap(self) -> None:
        while self._children:
            # Its group is killed before it is reaped, while no other process can have its id.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # A grader of another user may be beyond a process without the right to kill; it has ended anyway.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            pid, status = os.waitpid(ended.si_pid, 0)
            slot = self._children.pop(pid, -1)
            self._slots.pop(slot, None)
            self._say(Exited(slot, pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        for pid in self._children:
            _kill(pid)
        for pid in self._children:
            os.waitpid(pid, 0)
        os._exit(0)


def _kill(pid: int) -> None:
    """Kills a grader that isn't reaped yet, with all that it has started in its group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # It has just been forked and has no group of its own yet.


def _compare(answer: str, gold: str) -> str:
    from ..answers.symbolic import compare

    try:
        return compare(answer, gold)
    except RecursionError:
        return "unparsable"


def graders_trade(functions: list[str], memory_mb: int) -> Trade:
    """Graders that compare answers and call the user's own functions; imports what both need.

    Raises:
        ImportError: math-verify isn't installed.
        ConfigError: a function can't be imported.
    """
    from . import user_functions

    # Done first, so that a missing function is reported before math-verify takes its second.
    loaded = [user_functions.load(path) for path in functions]
    users = [f for f in loaded if not str(getattr(f, "__module__", "")).startswith("tandem.")]
    import sympy

    from ..answers.symbolic import warm_up

    warm_up()
    return Trade(
        handlers={
            "compare": _compare,
            "function": lambda index, *given: user_functions.call(loaded[index], *given),
        },
        files=[sympy.__file__, *(file for f in users if (file := user_functions.source_file(f)))],
        memory_mb=memory_mb,
    )


def runners_trade(sandbox: str) -> Trade:
    """Graders that run code in a sandbox.

    Raises:
        ConfigError: no sandbox works here.
    """
    from ..sandbox.code_runner import Runner

    runner = Runner(sandbox)
    about = f"sandbox: {runner.box.how}"
    return Trade(handlers={"code": runner.run}, about=about, runs_code=True)


def main(arguments: list[str]) -> int:
    """Runs ``zygote <control descriptor> <settings as JSON>``."""
    control = socket.socket(fileno=int(arguments[0]))
    settings = json.loads(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if settings["sandbox"] is None:
            held = confine_zygote()
            trade = graders_trade(settings["functions"], settings["memory_mb"])
        else:
            trade = runners_trade(settings["sandbox"])
            held = [trade.about]
    except ImportError as error:
        control.send(Failed(str(error)).pack())
        return 1
    except TandemError as error:
        control.send(Refused(str(error)).pack())
        return 1
    gc.collect()
    # Frozen out of garbage collection: a collection in a child would copy every page.
    gc.freeze()
    try:
        control.send(Ready(os.getpid(), tuple(held)).pack())
    except (BrokenPipeError, ConnectionResetError):
        return 0  # The pool has died in the meantime.
    Zygote(control, trade).run(settings["parent"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
