"""One of several ranks fails: what it says and its exit code come at once, whatever the others do.

With NCCL a rank that leaves its group waits for the others, which wait for it in the middle of a step. gloo returns at
once, so here the calls that would wait are made to.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.common.config import to_yaml
from tandem.common.run_folder import RunFolder
from tandem.launch.run.opened.presets import load
from tandem.learner.rendezvous import Seat, variables
from tandem.replay.connection import connect
from tandem.replay.store import RunStore

FAILS = """
import atexit, sys, time
import torch
import torch.distributed as dist
from tandem.common.errors import RunFailedError
from tandem.launch.cli import main
from tandem.learner import main as learner

def forever(*arguments):
    time.sleep(600)

def build(*arguments):
    dist.barrier()
    raise {
        "own": RunFailedError("the disk has gone: give the run another one"),
        "memory": torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        "defect": ZeroDivisionError("of a loss"),
    }[sys.argv[1]]

dist.destroy_process_group = forever
# In the place of the group's destructor.
atexit.register(forever)
learner.build = build
sys.exit(main(["learner", *sys.argv[2:]]))
"""
WAITS = """
import sys, time
import torch.distributed as dist
from tandem.learner.rendezvous import Seat, process_group

rank, port = map(int, sys.argv[1:])
with process_group(Seat(rank=rank, world_size=2, local_rank=rank, port=port)):
    dist.barrier()
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "error", "code", "said"),
    [
        (0, "own", 3, "tandem: the disk has gone: give the run another one\n"),
        (1, "memory", 1, "it asked for 2.00 GiB"),
        (1, "defect", 1, "ZeroDivisionError: of a loss\n"),
    ],
    ids=["rank-0", "no-memory", "defect"],
)
def test_a_rank_that_fails_says_so_and_ends_while_the_others_still_wait(
    rank: int, error: str, code: int, said: str, server: Any, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = RunFolder(tmp_path)
    folder.run_json.write_text("{}")
    join = server.join()
    folder.write_join(join)
    store = connect(join, name="test")
    RunStore(store).put_config(to_yaml(load("miniature").resolve(["learner.ranks=2"])))
    store.close()
    words = {
        "run": tmp_path,
        "rank": rank,
        "world-size": 2,
        "master-address": "127.0.0.1",
        "master-port": port,
    }
    options = [f"--{name}={value}" for name, value in words.items()]
    # A learner of an earlier test, in this process, has set its own.
    alone = {name: value for name, value in os.environ.items() if name not in variables(Seat())}
    other = subprocess.Popen([sys.executable, "-c", WAITS, str(1 - rank), str(port)], env=alone)
    try:
        failed = subprocess.run(
            [sys.executable, "-c", FAILS, error, *options],
            env=alone,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
            check=False,
        )
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    out = failed.stdout
    assert said in out
    assert ("Traceback" in out) == (error == "defect")
    assert failed.returncode == code
