"""Runs one rank of the learner on a run's folder: ``learner_process.py FOLDER RANK RANKS PORT``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from tandem.common.config import Config
from tandem.common.errors import TandemError
from tandem.common.run_folder import RunFolder, read_join
from tandem.common.telemetry import start_log


def run(path: str, rank: int, ranks: int, port: int) -> int:
    import yaml

    from tandem.learner.trainer import main
    from tandem.replay.connection import connect
    from tandem.replay.store import RunStore

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
            rank=rank,
            world_size=ranks,
            master_port=port or None,
        )
    except TandemError as error:
        print(f"learner: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
