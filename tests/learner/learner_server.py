"""Starts learner processes fast: imports once, then forks one for every rank that is asked for.

Reads JSON lines: ``{"folder", "rank", "ranks", "port"}`` answers ``{"pid"}`` (with ``"abandoned"``, this is how many
seconds without a rollout worker end the wait for an evaluation), and ``{"poll": pid}``
answers ``{"code"}``, null while it runs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed  # noqa: F401 - imported here so that no learner has to
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import yaml

from tandem.common.config import Config
from tandem.common.errors import TandemError
from tandem.common.run_folder import RunFolder, read_join
from tandem.common.telemetry import start_log
from tandem.learner.loop import evaluations
from tandem.learner.main import main
from tandem.learner.rendezvous import Seat
from tandem.replay.connection import connect
from tandem.replay.store import RunStore


def learn(path: str, rank: int, ranks: int, port: int) -> int:
    folder = RunFolder(Path(path))
    join = read_join(folder.join)
    store = connect(join, name="config")
    config = Config.model_validate(yaml.safe_load(RunStore(store).config_yaml()))
    store.close()
    start_log("learner")
    try:
        return main(
            join,
            config,
            name="learner-0",
            folder=folder,
            seat=Seat(rank=rank, world_size=ranks, local_rank=rank, port=port or None),
        )
    except TandemError as error:
        print(f"learner: {error}", file=sys.stderr)
        return error.exit_code


def fork(asked: dict[str, object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        log = Path(str(asked["folder"])) / "logs" / f"learner-{asked['rank']}.log"
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((0, nothing), (1, descriptor), (2, descriptor)):
            os.dup2(target, number)
        if "abandoned" in asked:
            evaluations.ABANDONED_SECONDS = float(str(asked["abandoned"]))
        code = learn(
            str(asked["folder"]),
            int(str(asked["rank"])),
            int(str(asked["ranks"])),
            int(str(asked["port"])),
        )
    except BaseException:  # noqa: BLE001 - told in the log; the code says that it failed
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    # As a learner that `tandem start` starts: nothing of what is loaded is looked through for garbage.
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            done, status = os.waitpid(asked["poll"], os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            print(json.dumps({"code": code}), flush=True)
        else:
            print(json.dumps({"pid": fork(asked)}), flush=True)


if __name__ == "__main__":
    serve()
