"""The process in which the user's callbacks run: imports them, calls one at a time, answers.

It is started by its own exec (``python -m tandem.launch.callbacks.calling``) and holds nothing of the run: no
connection, no password. Lines of JSON go over one socket::

    to it      {"callback": index, "step": n, "metrics": {…}}
    from it    {"ready": number of callbacks} or {"refused": why}, then for each call
               {"error": traceback or "", "asked": {…}} (see Handle.asked)
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ...common.confinement import die_with
from ...common.errors import ConfigError
from ...common.import_path import check_call, load
from .handle import Handle

KEY = "run.callbacks"
ERROR_LENGTH = 4000
"""Characters of a traceback that are passed on, from its end."""

Callback = Callable[[int, dict[str, float], Handle], Any]


def imported(path: str) -> Callback:
    """Imports a callback.

    Raises:
        ConfigError: there is no such function, or its module can't be imported; says why.
    """
    function: Any = load(path, key=KEY)
    if not callable(function):
        raise ConfigError(f"{KEY}={path} isn't a function: {function!r:.200}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{KEY}={path} is an async function, which is never awaited: write def")
    check_call(function, f"{KEY}={path}", "(step, metrics, handle)", 1, {}, Handle())
    return function


def call(callback: Callback, step: int, metrics: dict[str, float]) -> dict[str, Any]:
    """Calls a callback; its exception, whichever it is, becomes a part of the answer."""
    handle, error = Handle(), ""
    try:
        callback(step, metrics, handle)
    except BaseException:  # noqa: BLE001 - a user's function may raise anything, SystemExit too
        error = traceback.format_exc()[-ERROR_LENGTH:]
    return {"error": error, "asked": handle.asked()}


def end_with_host(alive: int) -> None:
    """Forks a process that kills this one's group, with all that callbacks start in it, once the pipe ``alive`` is
    closed: the host closes it, or was killed."""
    child = os.fork()
    if child:
        os.close(alive)
        os.waitpid(child, 0)
        return
    # Forked once more, so that no callback waits for it as for a child of its own.
    if os.fork() == 0:
        os.dup2(alive, 0)
        # Whatever is open here would keep the host from seeing that this process has ended.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor:
                with suppress(OSError):
                    os.close(descriptor)
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main(arguments: Sequence[str]) -> int:
    """Runs ``calling <socket's descriptor> <settings as JSON>`` until the other end is closed."""
    settings = json.loads(arguments[1])
    die_with(settings["parent"])
    end_with_host(settings["alive"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit = settings["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=int(arguments[0]))

    def say(message: dict[str, Any]) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    try:
        callbacks = [imported(path) for path in settings["callbacks"]]
    except ConfigError as error:
        say({"refused": str(error)})
        return ConfigError.exit_code
    try:
        say({"ready": len(callbacks)})
        for line in channel.makefile("rb"):
            request = json.loads(line)
            callback = callbacks[request["callback"]]
            answer = call(callback, request["step"], request["metrics"])
            # So that what was printed is in the log before the answer is acted on.
            sys.stdout.flush()
            say(answer)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Threads that a module has started don't delay the end.
    os._exit(code)
