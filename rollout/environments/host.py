"""The process in which episodes are played: loads one environment, and plays one episode after another.

Its server starts it by its own exec (``python -m tandem.rollout.environments.host``), with no variable of
the server's environment except where programs and modules are. It limits itself before the user's module
is imported, so whatever that starts has the same limits. It imports the standard library, msgspec and the
user's module only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import resource
import signal
import socket
import sys
import traceback

from ...common import import_path
from ...common.confinement import (
    adopt_orphans,
    can_drop_user,
    die_with,
    drop_user,
    no_new_privileges,
    readable_by_others,
)
from .forms import load
from .pipes import Channel, Doing, Order, Phase, Play, Raised, Ready

MAX_FILE_BYTES = 256 << 20
"""Longest file that an environment may write."""
MAX_FILES = 256
"""Files and sockets that it may have open."""
MAX_PROCESSES = 256
"""Processes and threads of its own user; where its user is the server's, nothing counts them."""
EXIT_REFUSED = 4


def confine(order: Order, parent: int) -> str:
    """Limits this process and all that it starts.

    Returns:
        Why root's process stays root; empty if it doesn't, or never was.
    """
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_AS, order.memory_bytes),
    ):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    # A write beyond the limit is then an error of the writer instead of its end.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.chdir(order.folder)
    no_new_privileges()
    own = [order.folder]
    if order.outputs is not None:
        os.makedirs(order.outputs)
        # Whatever the umask: its user must be seen to get there.
        os.chmod(order.outputs, 0o755)
        own.append(order.outputs)
    user, why = order.user, ""
    if user is not None:
        why = _why_root([*_files_of(order.target), *order.reads, *own[1:]], user)
        if not why:
            for folder in own:
                os.chown(folder, user, user)
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
            drop_user(user)
    adopt_orphans()
    # Last, since a change of user clears it.
    die_with(parent)
    return why


def _why_root(files: list[str], user: int) -> str:
    """Why root's process can't become that user, who must be able to read those files; empty if it can."""
    private = next((file for file in files if not readable_by_others(file)), None)
    if private is not None:
        # Names of files may be in no encoding, and then can't be sent as they are.
        return f"not every user may read {os.fsencode(private).decode('utf-8', 'replace')}"
    return "" if can_drop_user(user) else "it can become no other user here"


def _files_of(target: str) -> list[str]:
    """Files of Python itself, and of the environment's module and its package if there are any."""
    top = _top(target)
    files = [os.__file__, __file__, sys.executable]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is not None:
        if spec.origin is not None and os.path.exists(spec.origin):
            files.append(spec.origin)
        for folder in spec.submodule_search_locations or ():
            files += [os.path.join(folder, name) for name in os.listdir(folder)][:1000]
    return [file for file in files if not os.path.basename(file).startswith("__pyc")]


def in_a_line(error: BaseException) -> str:
    """An exception in a line, with the place in the user's code where it was raised."""
    if isinstance(error, SyntaxError):
        said = f"{type(error).__name__}: {error}"
    else:
        said = "".join(traceback.format_exception_only(error))
    place = _place_in(error)
    where = f" ({os.path.basename(place.filename)}, line {place.lineno})" if place else ""
    return f"{' '.join(said.split())[:3000]}{where}"


def _place_in(error: BaseException) -> traceback.FrameSummary | None:
    """The place in the user's code where an exception was raised; None if it was raised in ours."""
    frames = traceback.extract_tb(error.__traceback__)
    # Python's own importing has no file that anybody could look into.
    ours = os.path.dirname(__file__), import_path.__file__, "<frozen ", importlib.__file__
    return next((f for f in reversed(frames) if not f.filename.startswith(ours)), None)


def way_out(error: BaseException, order: Order) -> str:
    """What to do about an environment that can't be loaded; empty where its error says it."""
    if isinstance(error, ModuleNotFoundError) and error.name == _top(order.target):
        return import_path.WAY_OUT
    if isinstance(error, MemoryError):
        return f"Raise environments.memory_mb={order.memory_bytes >> 20}"
    # The arguments of an agent aren't its params alone.
    if isinstance(error, TypeError) and order.form != "agent":
        with contextlib.suppress(Exception):
            made = import_path.resolve(order.target)
            if (order.params and _place_in(error)) or import_path.misfit(made, **order.params):
                return f"It is given params={order.params!r:.200}"
    return ""


def _top(target: str) -> str:
    """The module or package that an import path begins with."""
    return target.partition(":")[0].partition(".")[0]


def serve(channel: Channel, parent: int) -> int:
    """Plays episodes until the server closes the channel."""
    order = channel.hear()
    if not isinstance(order, Order):
        return 0
    # Before, since it depends on the module's file which user may read it.
    sys.path += [folder for folder in order.path if folder not in sys.path]
    try:
        why_root = confine(order, parent)
        play_one = load(order.form, order.target, order.params)
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
        channel.say(Raised(in_a_line(error), way_out(error, order)))
        return EXIT_REFUSED
    channel.say(Ready(why_root))

    def doing(phase: Phase) -> None:
        channel.say(Doing(phase))

    while isinstance(play := channel.hear(), Play):
        try:
            done = play_one(play, doing)
        except BaseException as error:  # noqa: BLE001 - the same, even SystemExit
            channel.say(Raised(in_a_line(error)))
        else:
            channel.say(done)
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main(arguments: list[str]) -> int:
    """Runs ``host <descriptor> <process id of the server>``."""
    parent = int(arguments[1])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connected = socket.socket(fileno=int(arguments[0]))
    connected.set_inheritable(False)
    # By its end the server knows that this process has ended, whatever the environment has forked.
    os.register_at_fork(after_in_child=connected.close)
    try:
        code = serve(Channel(connected), parent)
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # The server has ended this process's socket, and will end the process.
    # What threads of the user's are still doing is of no interest.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
