"""Starts verifiers' own server, or lists the tasks of one of its tasksets, in the virtual environment that has it.

It is run as a file by that environment's Python, so it imports nothing of Tandem. The first line of its
input is the order, as JSON. A server's input then stays open, and its end is the end of the server, so that
none outlives the process that has started it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

ADOPTS_ORPHANS = 36
"""``PR_SET_CHILD_SUBREAPER`` of prctl: what a harness leaves behind is then found below this process."""
LAST_SECONDS = 10.0
"""Time to end runs and their programs, after which the process ends as it is."""


def main() -> int:
    """Reads the order and does it."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(ADOPTS_ORPHANS, 1, 0, 0, 0)
    # The harnesses call uv, which may be installed in this environment alone.
    os.environ["PATH"] = os.pathsep.join(
        [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    )
    if order["do"] == "list":
        return list_tasks(order)
    threading.Thread(target=end_with_input, daemon=True).start()
    from verifiers.v1.serve import serve_env

    serve_env(
        max_workers=1,
        address=order["address"],
        config_data=order["config"],
        log_setup=log_to_output,
    )
    return 0


def list_tasks(order: dict[str, Any]) -> int:
    """Writes the data of a taskset's tasks to a file, one JSON object a line."""
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    config = resolve_env_config(order["config"])
    taskset = load_taskset(config.taskset)
    if order["count"] is None and not taskset.bounded:
        print(f"the taskset {config.taskset.id} has no end: say how many tasks", file=sys.stderr)
        return 2
    with open(order["file"], "w", encoding="utf-8") as file:
        for task in itertools.islice(taskset, order["count"]):
            file.write(json.dumps(task.data.model_dump(mode="json"), ensure_ascii=False) + "\n")
    return 0


def log_to_output() -> None:
    """Makes verifiers' log part of what this process prints."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for chatty in ("httpx", "httpcore", "openai", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def end_with_input() -> None:
    """Ends this process when whoever has started it is gone."""
    # Not through sys.stdin, whose lock would keep the interpreter from ending.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
