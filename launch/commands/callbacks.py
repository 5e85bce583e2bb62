"""Call a run's callbacks (run.callbacks) while it runs; `tandem start` starts this process itself."""

from __future__ import annotations

import argparse
import signal
import sys

from ...common.run_folder import existing
from .options import joined


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", required=True, help="the run's folder")


def run(arguments: argparse.Namespace) -> int:
    """Calls them until SIGTERM or Ctrl-C."""
    from ...common import disk
    from ...common.run_folder import read_join
    from ...common.telemetry import start_log
    from ...replay.callback_requests import CallbackRequests
    from ..callbacks.host import Host

    disk.keep_streams()
    folder = existing(arguments.run)
    store, config = joined(read_join(folder.join), "callbacks")
    start_log("callbacks", config.log.level)
    disk.set_patience(config.launch.full_disk_seconds)

    def output(data: bytes) -> None:
        # Through the text stream, which shows control characters by their escapes.
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()

    host = Host(config, folder, CallbackRequests(store), output)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.end())
    try:
        host.run()
    finally:
        store.close()
    return 0
