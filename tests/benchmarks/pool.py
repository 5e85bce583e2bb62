"""What a group costs the reward pool and Redis on its way into the ledger, in CPU time.

    .venv/bin/python tests/benchmarks/pool.py            # 5 interleaved rounds a case

A sender leases groups of 8 samples and submits them, eight at a time, to a real pool (`tandem reward`), which
grades their answers and commits them; then a learner takes, fetches and confirms them, and lets them go. Beside it
a bare process does the least that anybody could: a ROUTER with the same CURVE keys receives the same
bytes, sets them in Redis unread and answers, and they are fetched and deleted.

Printed are medians of CPU milliseconds a group: of the pool's process without its graders (its
encryption is done in it), of redis-server, and the bare process's and its Redis's; CPU time hardly
depends on what others do meanwhile. Writes ``pool.json`` with ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq
from msgspec.structs import asdict, replace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from ledger import make_group  # noqa: E402 - of this folder
from redis_server import running  # noqa: E402 - of the folder above

from tandem.common import config as configs  # noqa: E402
from tandem.common import wire  # noqa: E402
from tandem.common.records import GroupReceipt, GroupSubmission, Problem, Version  # noqa: E402
from tandem.common.run_folder import JoinInfo, RunFolder  # noqa: E402
from tandem.common.sockets import (  # noqa: E402
    Authenticator,
    bind_router,
    connect_dealer,
    new_keys,
)
from tandem.replay.connection import connect  # noqa: E402
from tandem.replay.ledger import Ledger  # noqa: E402
from tandem.replay.ledger_records import LedgerSettings, Row  # noqa: E402
from tandem.replay.members import Members  # noqa: E402
from tandem.replay.store import RunStore  # noqa: E402

DEPTH = 8
"""Groups that are on their way at once, and groups of a row."""
DEADLINE_S = 120.0
PROBLEMS = 1000
ANSWER = "</think> So the answer is $\\boxed{42}$."
"""The end of each text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size of groups."""

    tokens: int
    """Of each sample."""
    groups: int
    """Sent in a round; a multiple of DEPTH."""


def cases(quick: bool) -> list[Case]:
    """All; or, to try the script, with few groups."""
    few = 4 if quick else 1
    return [
        Case(tokens=74, groups=2048 // few),
        Case(tokens=2048, groups=256 // few),
        Case(tokens=8192, groups=128 // few),
    ]


def cpu(process: psutil.Process) -> float:
    """Seconds of all of its threads, not of its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def child(command: list[str], folder: Path) -> Iterator[psutil.Process]:
    """A process that ends with the block."""
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def until(found: Any, what: str, log: Path) -> Any:
    """The first true answer of ``found``."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if answer := found():
            return answer
        time.sleep(0.05)
    raise SystemExit(f"{what} did not come in {DEADLINE_S:.0f} s:\n{log.read_text()}")


def exchange(socket: zmq.Socket[bytes], messages: list[bytes]) -> list[bytes]:
    """Sends all, and waits for as many answers."""
    for message in messages:
        socket.send(message)
    answers = []
    for _ in messages:
        if not socket.poll(int(DEADLINE_S * 1000)):
            raise SystemExit(f"no answer in {DEADLINE_S:.0f} s")
        answers.append(socket.recv())
    return answers


def through_ledger(join: JoinInfo, folder: Path, case: Case, redis: psutil.Process) -> list[float]:
    """CPU milliseconds a group, of the pool and of Redis."""
    store = connect(join, name="setup")
    run = RunStore(store)
    tree = {"data": {"train": [{"path": "a.parquet"}]}, "rollout": {"group_size": 8}}
    steps = case.groups // DEPTH
    config = configs.build(
        tree, [f"run.steps={steps}", f"replay.groups_per_step={DEPTH}", f"replay.max_staleness={steps}"]
    )  # fmt: skip
    run.put_config(configs.to_yaml(config))
    group = make_group(case.tokens)
    group = replace(
        group,
        samples=tuple(
            replace(
                sample,
                text=sample.text[: -len(ANSWER)] + ANSWER,
                reward=None,
                verdict=None,
                components={},
                extracted=None,
                grader="",
            )
            for sample in group.samples
        ),
    )
    run.put_problems(
        Problem(
            problem_id=f"a/{row}",
            prompt_text=group.prompt_text,
            prompt_tokens=group.prompt_tokens,
            gold=group.gold,
            data_source="a",
            ability="math",
            trace_ids=(),
            extra={},
        )
        for row in range(PROBLEMS)
    )
    ledger = Ledger(store, "rollout-0")
    ledger.create(LedgerSettings.of(config, [("a", PROBLEMS, 1)], "digest"))
    term = ledger.new_term()
    run_folder = RunFolder(folder)
    run_folder.write_join(join)
    command = [sys.executable, "-m", "tandem.launch.cli", "reward", "--join", str(run_folder.join)]
    with child(command, folder) as pool:
        (member,) = until(lambda: Members(store).live("reward"), "the pool", folder / "log")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = connect_dealer(
            context,
            member.info["endpoint"],
            identity="rollout-0",
            server_public=member.info["public_key"],
            client=run.curve_client(),
        )
        begun: list[float] = []
        for step in range(1, steps + 1):
            leases = ledger.lease(Version(term=term, step=0), DEPTH).leases
            named = [
                replace(group, group_id=a.group_id, attempt=a.attempt, problem_id=a.problem_id)
                for a in leases
            ]
            messages = [
                wire.encode(GroupSubmission(request_id=i, group=one)) for i, one in enumerate(named)
            ]
            if step == 1:  # the first ones warm up
                begun = [cpu(pool), cpu(redis)]
            for answer in exchange(socket, messages):
                receipt = wire.decode(answer, GroupReceipt)
                assert receipt.result == "committed", receipt
            row = ledger.take(step, term)
            assert isinstance(row, Row), row
            assert len(ledger.fetch(row)) == DEPTH
            ledger.confirm(step, term)
            ledger.durable(step, term)
        spent = [now - then for now, then in zip([cpu(pool), cpu(redis)], begun, strict=True)]
        socket.close()
        context.term()
    store.close()
    return [1000 * seconds / case.groups for seconds in spent]


def serve_bare(join: JoinInfo, client_public: bytes, told: Path) -> None:
    """Receives, sets, answers."""
    redis = connect(join, name="bare").redis
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = Authenticator(context, client_public.decode())
    keys = new_keys()
    router, endpoint = bind_router(context, "127.0.0.1", keys, None)
    told.write_text(json.dumps([endpoint, keys.public]))
    serial = 0
    try:
        while True:
            router.poll()
            pipeline = redis.pipeline(transaction=False)
            routes = []
            while router.poll(0):
                *route, data = router.recv_multipart()
                pipeline.set(f"bare:{serial % DEPTH}", data)
                routes.append(route)
                serial += 1
            pipeline.execute()
            for route in routes:
                router.send_multipart([*route, b"ok"])
    finally:
        authenticator.stop()


def bare(join: JoinInfo, folder: Path, case: Case, redis: psutil.Process) -> list[float]:
    """CPU milliseconds a group, of the bare process and of Redis."""
    client = new_keys()
    told = folder / "told.json"
    (folder / "join.json").write_text(json.dumps(asdict(join)))
    store = connect(join, name="bare-learner")
    command = [sys.executable, str(Path(__file__).resolve()), "--bare", str(folder)]
    with child([*command, f"--client={client.public}"], folder) as process:
        endpoint, public = until(
            lambda: told.exists() and json.loads(told.read_text() or "null"),
            "the bare process",
            folder / "log",
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = connect_dealer(
            context, endpoint, identity="rollout-0", server_public=public, client=client
        )
        message = wire.encode(GroupSubmission(request_id=0, group=make_group(case.tokens)))
        exchange(socket, [message])
        begun = [cpu(process), cpu(redis)]
        names = [f"bare:{i}" for i in range(DEPTH)]
        for _ in range(case.groups // DEPTH):
            exchange(socket, [message] * DEPTH)
            store.redis.mget(names)
            store.redis.unlink(*names)
        spent = [now - then for now, then in zip([cpu(process), cpu(redis)], begun, strict=True)]
        socket.close()
        context.term()
    store.close()
    return [1000 * seconds / case.groups for seconds in spent]


def measure(side: str, case: Case) -> list[float]:
    """One round of a case on a fresh server: milliseconds of the pool and of Redis."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-bench-") as name,
        running(Path(name), appendfsync="no") as server,
    ):
        assert server.process is not None
        redis = psutil.Process(server.process.pid)
        folder = Path(name) / "run"
        folder.mkdir()
        work = through_ledger if side == "ledger" else bare
        return work(server.join("bench"), folder, case, redis)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few groups, to try it")
    parser.add_argument("--out", type=Path, help="folder for pool.json")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        join = JoinInfo(**json.loads((arguments.bare / "join.json").read_text()))
        serve_bare(join, arguments.client.encode(), arguments.bare / "told.json")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"medians of {arguments.rounds} rounds, CPU ms a group; in brackets the rounds\n")
    print("| groups of | pool | bare | Redis | Redis, bare |\n|---|---|---|---|---|")
    found: dict[str, dict[str, list[list[float]]]] = {}
    for case in cases(arguments.quick):
        rounds: dict[str, list[list[float]]] = {"ledger": [], "bare": []}
        for number in range(arguments.rounds):
            # Who goes first changes, so that neither always finds the warmer machine.
            for side in ("ledger", "bare") if number % 2 else ("bare", "ledger"):
                rounds[side].append(measure(side, case))
        name = f"8 x {case.tokens:,} tokens"
        found[name] = rounds
        cells = [
            f"**{statistics.median(values):.2f}** ({' '.join(f'{v:.2f}' for v in values)})"
            for place in (0, 1)
            for side in ("ledger", "bare")
            for values in [[one[place] for one in rounds[side]]]
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "pool.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
