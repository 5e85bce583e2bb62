"""The whole rollout worker beside its engine alone, on the same requests.

The worker is a real process with a real Redis, a ledger that admits all groups at once, a pool that
commits each group over ZeroMQ, and the weights of a real publisher. The engine alone is a process
that gives the same prompts to the same engine, all at once, with as many places as the worker has
rows, and leaves the samples there. Rates are of what follows the first batch, so that
neither side counts its start: tokens by the clock between the first batch's last group and the last
group. Called by :mod:`engines`; by itself it is the engine alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout"))

from msgspec.structs import asdict, replace
from redis_server import running
from stand_in_pool import StandInPool

from tandem.common.config import Config, build, to_yaml
from tandem.common.models import load_model
from tandem.common.records import (
    CommitResult,
    Group,
    Problem,
    SamplingParams,
    Verdict,
    Version,
)
from tandem.common.weights.sender import WeightSender
from tandem.replay.connection import connect
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings
from tandem.replay.members import Members, membership
from tandem.replay.store import RunStore
from tandem.rollout.engine import GroupRequest
from tandem.rollout.engines import make_engine

DEADLINE_S = 300.0
START = """
import json, sys, yaml
from tandem.common.config import build
from tandem.common.run_folder import JoinInfo
from tandem.replay.connection import connect
from tandem.replay.store import RunStore
from tandem.rollout.main import main
join = JoinInfo(**json.load(open(sys.argv[1])))
store = connect(join)
config = build(yaml.safe_load(RunStore(store).config_yaml()))
store.close()
sys.exit(main(join, config, name="rollout-0", folder=None))
"""

Arrival = tuple[float, float, int]
"""Of a group: the clock, the process's processor seconds so far, its tokens."""


def settings(
    folder: Path, engine: str, groups: int, batch: int, group_size: int, new: int
) -> dict[str, Any]:
    """A run's config, in which all groups are admitted at once."""
    return {
        "run": {"steps": 1000},
        "model": {"path": str(folder)},
        "data": {"train": [{"path": "unused.parquet", "name": "train"}]},
        "rollout": {
            "engine": engine,
            "group_size": group_size,
            "groups_per_batch": batch,
            "max_new_tokens": new,
        },
        "replay": {"groups_per_step": groups, "lease_seconds": 60},
        "launch": {"drain_seconds": 20},
    }


def rates(arrivals: Sequence[Arrival], batch: int) -> tuple[float, float]:
    """Tokens a second after the first batch: by the clock, and by the processor."""
    ordered = sorted(arrivals)
    clock, processor, _ = ordered[batch - 1]
    tokens = sum(count for *_, count in ordered[batch:])
    return tokens / (ordered[-1][0] - clock), tokens / (ordered[-1][1] - processor)


def alone(tree: dict[str, Any], prompts: list[list[int]]) -> list[Arrival]:
    """The engine alone, in this process."""
    config = build(tree)
    torch.set_num_threads(config.rollout.threads)
    torch.set_num_interop_threads(1)
    rollout = config.rollout
    rows = rollout.groups_per_batch * rollout.group_size
    engine = make_engine(
        config.model, rollout, max_rows=rows, max_prompt_tokens=config.data.max_prompt_tokens
    )
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens, temperature=1.0, top_p=1.0, top_k=0
    )
    requests = [
        GroupRequest(
            group_id=f"0-{i}",
            prompt_tokens=np.array(prompt, dtype=np.int32),
            count=rollout.group_size,
            sampling=sampling,
            seed=0,
        )
        for i, prompt in enumerate(prompts)
    ]
    found: list[Arrival] = []

    async def run() -> None:
        await engine.start()
        async for group in engine.generate(requests):
            assert group.error is None, group.error
            tokens = sum(len(s.tokens) for s in group.samples)
            found.append((time.perf_counter(), time.process_time(), tokens))
        await engine.close()

    asyncio.run(run())
    return found


class WholeWorker:
    """Everything of a run but the worker: Redis, ledger, pool, and a learner that publishes once."""

    def __init__(self, tree: dict[str, Any], prompts: list[list[int]], folder: Path) -> None:
        self._folder = folder
        self._arrivals: list[Arrival] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._config: Config = build(tree)
        self._prompts = prompts

    def run(self) -> list[Arrival]:
        """Starts a worker and waits for all groups."""
        with running(self._folder) as server:
            join = server.join()
            store = connect(join)
            runs, members = RunStore(store), Members(store)
            ledger = Ledger(store, "learner-0")
            runs.put_config(to_yaml(self._config))
            runs.put_problems([problem(i, prompt) for i, prompt in enumerate(self._prompts)])
            sources = [("train", len(self._prompts), 1)]
            ledger.create(LedgerSettings.of(self._config, sources, "digest"))
            term = ledger.new_term()
            publisher = WeightSender(membership(store, "learner-0"), self._config, term)
            publisher.start()
            model = load_model(self._config.model.path)
            publisher.publish(Version(term=term, step=0), list(model.named_parameters()))
            commits = Ledger(store, "reward-0")
            pool = StandInPool(runs.curve_client(), lambda group: self._judge(commits, group))
            info = {"endpoint": pool.address.endpoint, "public_key": pool.address.public_key}
            members.register("reward", "reward-0", info)
            ended = threading.Event()
            heart = threading.Thread(target=lambda: _beat(members, ended), daemon=True)
            heart.start()
            path = self._folder / "join.json"
            path.touch(mode=0o600)
            path.write_text(json.dumps(asdict(join)))
            try:
                with (self._folder / "worker.log").open("wb") as log:
                    command = [sys.executable, "-c", START, str(path)]
                    self._process = subprocess.Popen(command, stdout=log, stderr=log)
                self._wait(len(self._prompts))
            finally:
                if self._process is not None:
                    self._process.kill()
                    self._process.wait(10)
                ended.set()
                heart.join(5)
                pool.die()
                publisher.close()
                store.close()
        return self._arrivals

    def _judge(self, ledger: Ledger, group: Group) -> tuple[CommitResult, str]:
        assert self._process is not None
        clock = time.perf_counter()
        used = sum(psutil.Process(self._process.pid).cpu_times()[:2])
        self._arrivals.append((clock, used, sum(len(s.tokens) for s in group.samples)))
        graded = tuple(replace(s, verdict=Verdict.WRONG, reward=0.0) for s in group.samples)
        return ledger.commit(replace(group, samples=graded)), ""

    def _wait(self, groups: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while len(self._arrivals) < groups:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > end:
                told = (self._folder / "worker.log").read_text()[-3000:]
                raise RuntimeError(f"{len(self._arrivals)} of {groups} groups came: {told}")
            time.sleep(0.05)


def _beat(members: Members, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        members.beat("reward-0")


def problem(number: int, prompt: list[int]) -> Problem:
    """A problem that is its prompt."""
    return Problem(
        problem_id=f"train/{number}",
        prompt_text="",
        prompt_tokens=np.array(prompt, dtype=np.int32),
        gold="1",
        data_source="benchmark",
        ability="math",
        trace_ids=(),
        extra={},
    )


def measure(
    name: str, engine: str, tree: dict[str, Any], prompts: list[list[int]], pairs: int
) -> dict[str, Any]:
    """Medians and ratios of interleaved pairs, each side in processes of its own."""
    batch = tree["rollout"]["groups_per_batch"]
    found: dict[str, list[tuple[float, float]]] = {"worker": [], "alone": []}
    for _ in range(pairs):
        given = json.dumps({"tree": tree, "prompts": prompts})
        ran = subprocess.run(
            [sys.executable, __file__],
            input=given,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        if ran.returncode:
            raise RuntimeError(ran.stderr[-3000:])
        found["alone"].append(rates(json.loads(ran.stdout.splitlines()[-1]), batch))
        with tempfile.TemporaryDirectory() as temporary:
            arrivals = WholeWorker(tree, prompts, Path(temporary)).run()
        found["worker"].append(rates(arrivals, batch))
    both = list(zip(found["worker"], found["alone"], strict=True))
    wall, processor = ([a[i] / b[i] for a, b in both] for i in (0, 1))
    return {
        "model": name,
        "engine": engine,
        "tokens_per_second": {
            side: statistics.median(rate for rate, _ in all_) for side, all_ in found.items()
        },
        "ratio": statistics.median(wall),
        "pairs": wall,
        "ratio_of_processor_seconds": statistics.median(processor),
    }


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(alone(asked["tree"], asked["prompts"])))
