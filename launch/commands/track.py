"""Send a run's metrics to Weights & Biases or TensorBoard, while it runs or afterwards."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError
from ...common.plain import one_line
from ...common.run_folder import RunFolder
from .options import add_folder, named_folder

if TYPE_CHECKING:
    from ...common.config import Config
    from ..trackers.tracker import Tracker

END_SECONDS = 40.0
"""Time for the last records and uploads once a run has ended."""
STOPS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask it to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument(
        "--to", choices=("wandb", "tensorboard"), required=True, help="where they are sent"
    )
    parser.add_argument(
        "--offline", action="store_true", help="wandb: keep it here, to be synchronised later"
    )
    parser.add_argument(
        "--follow", action="store_true", help="keep sending new records until SIGTERM or Ctrl-C"
    )


def run(arguments: argparse.Namespace) -> int:
    """Sends the records that were not sent before."""
    from ...common.config import build, read_yaml
    from ..board.tail import MetricsTail
    from ..trackers.following import Following, Sent
    from ..trackers.wandb_run import wandb_id_of

    folder = named_folder(arguments)
    config = build(read_yaml(folder.config), stored=True)
    stop = threading.Event()
    signals: list[int] = []

    def heed(number: int, _: object) -> None:
        signals.append(number)
        if arguments.follow:
            _end(stop, 1)
            return
        for one in STOPS:
            signal.signal(one, signal.SIG_DFL)
        _end(stop, 128 + number)
        print("stopping; once more ends it at once", file=sys.stderr, flush=True)

    for one in STOPS:
        signal.signal(one, heed)
    state = folder.trackers / f"{arguments.to}.json"
    record = folder.read_run()
    wandb_id = wandb_id_of(record, folder.path)
    if arguments.to == "wandb" and wandb_id != record["run_id"]:
        # To the tracker, a copy of a run is a new run and gets every record.
        state = folder.trackers / f"{wandb_id}.json"
    sent = Sent.read(state)
    tracker, where = _tracker(arguments, config, folder, sent, wandb_id)
    if tracker.rows is not None and tracker.rows < sent.rows:
        print(f"the server has {tracker.rows} of {sent.rows} records: the rest is sent again")
        sent.go_back(tracker.rows, MetricsTail(folder.metrics).records())
    following = Following(tracker, folder.metrics, state, sent)
    before = sent.rows
    if arguments.follow:
        print(where, flush=True)
        following.follow(stop)
    else:
        following.catch_up(stop)
    tracker.close()
    print(f"{sent.rows - before} records sent ({sent.rows} in all): {where}")
    if signals and not arguments.follow:
        print("stopped; the same command sends the rest", file=sys.stderr)
        return 128 + signals[0]
    return 0


def _end(stop: threading.Event, code: int) -> None:
    """Asks the loop to end; a library that hangs in a call doesn't delay the end of the run.

    Args:
        stop: is set.
        code: the exit code if it hangs.
    """
    stop.set()
    last = threading.Timer(END_SECONDS, os._exit, (code,))
    last.daemon = True
    last.start()


def _tracker(
    arguments: argparse.Namespace, config: Config, folder: RunFolder, sent: Any, wandb_id: str
) -> tuple[Tracker, str]:
    """The destination, and how to look at it."""
    from ...common.config import to_yaml
    from ..wording import shown

    if arguments.to == "tensorboard":
        _must_have("tensorboard")
        from ..trackers.tensorboard_log import TensorboardLog

        log = TensorboardLog(folder.tensorboard, to_yaml(config), first=not sent.rows)
        return log, f"tensorboard --logdir {shown(folder.tensorboard)}"
    _must_have("wandb")
    from ..trackers.wandb_run import Mode, WandbRun, mode_of

    wanted: Mode = "online"
    if arguments.offline or config.log.wandb == "offline":
        wanted = "offline"
    mode, why = mode_of(wanted)
    if why:
        print(f"W&B goes offline: {why}", file=sys.stderr, flush=True)
    make = partial(
        WandbRun,
        folder.path,
        run_id=wandb_id,
        project=config.log.wandb_project,
        name=folder.path.name,
        config=config.model_dump(mode="json"),
    )
    import wandb

    try:
        wandb_run = make(mode=mode)
    except wandb.errors.CommError as error:
        if mode == "offline":
            raise
        said = f"W&B goes offline, its server can't be used: {one_line(error)}"
        print(said, file=sys.stderr, flush=True)
        mode = "offline"
        # wandb's service holds the id until it ends.
        wandb.teardown()
        wandb_run = make(mode=mode)
    synced = f"wandb sync {shown(folder.wandb)}/offline-run-*"
    return wandb_run, synced if mode == "offline" else f"project {config.log.wandb_project}"


def _must_have(package: str) -> None:
    import importlib.util

    from ..wording import shown_python

    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the package {package} isn't installed: `{shown_python()} -m pip install {package}`"
        )
