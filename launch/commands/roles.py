"""Runs one role (rollout worker, environment server, reward pool, learner rank) in this process, however it was started."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NoReturn

from .options import add_run, joined, locate

if TYPE_CHECKING:
    from ...common.config import Config
    from ..host.held_gpus import HeldGpus

ENTRY = {
    "rollout": "tandem.rollout.main",
    "environments": "tandem.rollout.environments.server",
    "reward": "tandem.reward.pool",
    "learner": "tandem.learner.main",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every role takes."""
    add_run(parser)
    parser.add_argument(
        "--name", metavar="ID", help="member id (default: role, host, process id and a random part)"
    )


def await_run(role: str) -> list[str]:
    """Loads a role's libraries while its run is prepared; returns the role's command once the run is there.

    The supervisor writes two lines to standard input: the config with what to fork on the way, and when the run is
    there the command with the log's path. If it closes the input instead, the process ends.
    """
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    told = json.loads(line)
    stdin = None
    if told["forks"] is not None:
        from ..run.processes import forked

        _try_to_load("rollout", told["config"])
        stdin = forked.fork(told["forks"])
    if stdin is None:
        stdin = sys.stdin.buffer
        _try_to_load(role, told["config"])
    line = stdin.readline()
    if not line:
        sys.exit(0)
    told = json.loads(line)
    for descriptor, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, told["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, mode, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    return [str(word) for word in told["words"]]


def load_alone(role: str) -> None:
    """Loads what a role of the miniature needs, as far as it is installed.

    For the set-up: Python then has the modules compiled.
    """
    from ..run.opened.presets import load

    with contextlib.suppress(ImportError):
        _load(role, load("miniature").resolve([]))


def _try_to_load(role: str, config: str) -> None:
    """Loads what a role needs by a config in JSON; what is wrong with it is told when the role itself needs it, and has a log."""
    from ...common.config import Config

    with contextlib.suppress(Exception):
        _load(role, Config.model_validate_json(config))


def _load(role: str, config: Config) -> None:
    """Loads a role's module and the libraries that its ``main`` needs."""
    # Nothing of what is imported is garbage until the process ends: looking for some takes a seventh of the time
    # here, and a third of a second when the role begins its work.
    gc.disable()
    # Some libraries report what isn't freed at the end of the process, also of one that failed to load something.
    atexit.register(gc.unfreeze)
    try:
        importlib.import_module(ENTRY[role]).load(config)
    finally:
        gc.freeze()
        gc.enable()


def run_role(
    role: str,
    arguments: argparse.Namespace,
    more: Callable[[Config], Mapping[str, Any]] = lambda config: {},
    *,
    drain: float | None = None,
) -> NoReturn:
    """Joins the run and works until it has ended, or SIGTERM or Ctrl-C asks it to drain; then exits.

    Args:
        role: its name.
        arguments: of the command line.
        more: further arguments of the role's ``main``, by the run's config.
        drain: seconds to finish what is under way; None = the run's ``launch.drain_seconds``.

    Raises:
        TandemError: the run can't be joined.
        OutOfMemoryError: there is too little memory; the message says which settings would free most.
    """
    from ...common import disk
    from ...common.errors import OutOfMemoryError
    from ...common.memory import telling_parts
    from ...common.telemetry import start_log
    from ...replay.hosts import new_member
    from ..failures import tell
    from ..host.held_gpus import HeldGpus
    from ..plan.advice import advice
    from ..run.processes.parts import PLACED, THREAD_VARIABLES

    disk.keep_streams()
    join, folder = locate(arguments)
    name = arguments.name or new_member(f"{role}-{socket.gethostname()}-{os.getpid()}")
    store, config = joined(join, name)
    store.close()
    if drain is not None:
        launch = config.launch.model_copy(update={"drain_seconds": drain})
        config = config.model_copy(update={"launch": launch})
    start_log(role, config.log.level)
    disk.set_patience(config.launch.full_disk_seconds)
    threading.excepthook = _end_with_a_thread
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        _ctrl_c_drains()
    # The environment is read when numerical libraries are loaded, below.
    unset = [variable for variable in THREAD_VARIABLES if variable not in os.environ]
    if unset:
        os.environ.update(dict.fromkeys(unset, str(_threads(role, config))))
    held = HeldGpus()
    if role == "rollout" and PLACED not in os.environ:
        os.environ.update(_seeing(config, held))
    entry = importlib.import_module(ENTRY[role])
    try:
        try:
            with telling_parts(dict):
                code = int(entry.main(join, config, name=name, folder=folder, **more(config)))
        except OutOfMemoryError as error:
            named = OutOfMemoryError(error.asked, error.parts, name, advice(config, role))
            raise named from error
    except (Exception, KeyboardInterrupt) as error:
        if role != "learner" or config.learner.ranks == 1:
            raise
        # Its process group is still there, whose destructor may wait for the other ranks (rendezvous.py).
        told = tell(error, [str(value) for value in vars(arguments).values()])
        if told is None:
            traceback.print_exception(error)
        _leave(1 if told is None else told)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process at once, now that everything is written and closed."""
    # A native thread still waiting for a peer (gloo can't be woken) would abort the interpreter's own
    # shutdown and turn success into a SIGABRT.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _seeing(config: Config, held: HeldGpus) -> dict[str, str]:
    """Variables by which a worker that was started by hand sees the GPUs that it holds; the launcher chooses them itself.

    Raises:
        ConfigError: too few are left, and ``launch.gpus=required``.
    """
    from ..run.joining import free_gpus
    from ..run.processes.parts import seeing

    if config.launch.gpus == "none":
        return seeing(())
    if shutil.which("nvidia-smi") is None:
        # CUDA may find some without it.
        return {}
    each = config.rollout.gpus_per_worker
    say = logging.getLogger("tandem").warning
    (gpus,) = free_gpus(config, "rollout", 1, each, held=held, say=say)
    return seeing(gpus)


def _threads(role: str, config: Config) -> int:
    """CPU threads of a role that was started by hand; the launcher counts them itself."""
    if role == "rollout":
        return config.rollout.threads
    if role != "learner":
        return 1
    from ..plan.hardware import machine
    from ..plan.placement import learner_threads

    host = machine()
    on_gpu = config.launch.gpus != "none" and bool(host.gpus)
    return learner_threads(config, on_gpu=on_gpu, cores=host.cores)


def _end_with_a_thread(failed: threading.ExceptHookArgs) -> None:
    """Ends the process when a thread of ours dies of an error that nobody expected: the others would wait
    for it for ever, while a process that has ended is started anew."""
    modules = {frame.f_globals.get("__name__", "") for frame, _ in walk_tb(failed.exc_traceback)}
    ours = any(module.startswith("tandem.") for module in modules)
    if failed.exc_type is SystemExit or not ours:
        threading.__excepthook__(failed)
        return
    name = failed.thread.name if failed.thread is not None else "?"
    logging.getLogger("tandem").critical(
        f"thread {name} has failed, so the process ends", exc_info=failed.exc_value
    )
    logging.shutdown()
    os._exit(1)


def _ctrl_c_drains() -> None:
    """Makes the first Ctrl-C in a role's own terminal a SIGTERM; the second one ends the role."""

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, first)
