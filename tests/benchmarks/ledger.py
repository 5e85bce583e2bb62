"""Groups through the ledger beside the same bytes through a bare pipelined Redis client.

    .venv/bin/python tests/benchmarks/ledger.py            # 5 interleaved pairs a case

Both sides have four writer processes and one reader, a fresh redis-server each with the same
append-only policy, and the same depth: groups of one call (``--depth``) and groups of one read
(``--row``). Both encode every group to its message and decode it again.

==========  ==========================================  =====================================
            ledger                                      bare
==========  ==========================================  =====================================
put         lease, give the group its id, commit_many   give it its id, encode, pipelined SET
taken       take, fetch, confirm                        pipelined GET, decode
==========  ==========================================  =====================================

Cases: 8 samples of 2,048 tokens with ``appendfsync no`` (what ``ledger.durability=process``
sets) and with ``always`` (``power``), and 8 samples of 74 tokens. Prints medians and the ratio of
rates, ledger over bare, of putting, of taking and of both; writes ``ledger.json`` with ``--out``.
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

import numpy as np
from msgspec.structs import asdict, replace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from redis_server import running  # noqa: E402 - of the folder above

from tandem.common import wire  # noqa: E402
from tandem.common.records import (  # noqa: E402
    FinishReason,
    Group,
    Problem,
    Sample,
    SamplingParams,
    Verdict,
    Version,
    VersionSpan,
)
from tandem.common.run_folder import JoinInfo  # noqa: E402
from tandem.replay.connection import connect  # noqa: E402
from tandem.replay.ledger import Ledger  # noqa: E402
from tandem.replay.ledger_records import LedgerSettings, Row  # noqa: E402
from tandem.replay.store import RunStore  # noqa: E402

WRITERS = 4
SAMPLES = 8
DEADLINE_S = 300.0
TERM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of group, under one policy."""

    name: str
    """What the table calls it."""
    tokens: int
    """Of each sample."""
    groups: int
    """Put and taken in all; a multiple of writers, depth and row."""
    appendfsync: str
    """Of redis-server."""


def cases(quick: bool) -> list[Case]:
    """All; or, to try the script, with few groups."""
    long, short = (64, 256) if quick else (512, 16384)
    return [
        Case(name="8 x 2,048 tokens", tokens=2048, groups=long, appendfsync="no"),
        Case(name="8 x 2,048, power", tokens=2048, groups=long, appendfsync="always"),
        Case(name="8 x 74 tokens", tokens=74, groups=short, appendfsync="no"),
    ]


def make_group(tokens: int) -> Group:
    """A graded group as it leaves the reward pool: ids, log-probs, spans, rewards, text."""
    rng = np.random.default_rng(7)
    words = rng.integers(97, 123, (SAMPLES, 4 * tokens), dtype=np.uint8)
    samples = tuple(
        Sample(
            tokens=rng.integers(0, 150_000, tokens, dtype=np.int32),
            source=np.zeros(tokens, np.uint8),
            logprobs=-rng.random(tokens, np.float32),
            spans=(
                VersionSpan(term=TERM, step=0, start=0, end=tokens // 2),
                VersionSpan(term=TERM, step=1, start=tokens // 2, end=tokens),
            ),
            finish_reason=FinishReason.STOP,
            sampling=SamplingParams(max_new_tokens=tokens, temperature=1.0, top_p=1.0, top_k=0),
            text=words[i].tobytes().decode("ascii"),
            reward=float(i % 2),
            verdict=Verdict.CORRECT if i % 2 else Verdict.WRONG,
            components={"accuracy": float(i % 2), "format": 1.0},
            extracted="42",
            grader="math@1",
        )
        for i in range(SAMPLES)
    )
    return Group(
        group_id="0-0",
        attempt=1,
        worker="rollout-0",
        problem_id="bench/0",
        prompt_tokens=np.arange(64, dtype=np.int32),
        prompt_text="x" * 256,
        gold="42",
        data_source="bench",
        samples=samples,
        trace_ids=(),
        extra={},
    )


# -- the processes: each says "ready", waits for "go", works, and prints its seconds --------------


def _go() -> float:
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit("the benchmark ended before it began")
    return time.perf_counter()


def _done(begun: float) -> None:
    print(json.dumps(time.perf_counter() - begun), flush=True)


def put_ledger(join: JoinInfo, number: int, share: int, depth: int, tokens: int) -> None:
    """A worker with its pool: leases and commits ``share`` groups."""
    group = make_group(tokens)
    ledger = Ledger(connect(join, name=f"rollout-{number}"), f"rollout-{number}")
    held = Version(term=TERM, step=0)
    ledger.problem_ids(["0-0"])  # the problems' names are read once in a run
    begun = _go()
    done = 0
    while done < share:
        leases = ledger.lease(held, min(depth, share - done)).leases
        groups = [
            replace(group, group_id=lease.group_id, attempt=lease.attempt) for lease in leases
        ]
        for receipt in ledger.commit_many(groups):
            assert receipt.result == "committed", receipt
        done += len(groups)
    _done(begun)


def take_ledger(join: JoinInfo, rows: int) -> None:
    """A learner: takes, fetches and confirms every row."""
    ledger = Ledger(connect(join, name="learner"), "learner")
    begun = _go()
    for step in range(1, rows + 1):
        row = ledger.take(step, TERM)
        assert isinstance(row, Row), row
        assert len(ledger.fetch(row)) == len(row.ids)
        ledger.confirm(step, TERM)
    _done(begun)


def put_bare(join: JoinInfo, number: int, share: int, depth: int, tokens: int) -> None:
    """Sets ``share`` encoded groups, ``depth`` in a pipeline."""
    group = make_group(tokens)
    client = connect(join, name=f"bare-{number}").redis
    begun = _go()
    for first in range(0, share, depth):
        pipeline = client.pipeline(transaction=False)
        for i in range(first, min(first + depth, share)):
            serial = number * share + i
            named = replace(group, group_id=f"0-{serial}", attempt=1)
            pipeline.set(f"bare:{serial}", wire.encode(named))
        assert all(pipeline.execute())
    _done(begun)


def take_bare(join: JoinInfo, groups: int, depth: int) -> None:
    """Gets and decodes every group, ``depth`` in a pipeline."""
    client = connect(join, name="bare").redis
    begun = _go()
    for first in range(0, groups, depth):
        pipeline = client.pipeline(transaction=False)
        for serial in range(first, min(first + depth, groups)):
            pipeline.get(f"bare:{serial}")
        for payload in pipeline.execute():
            wire.decode(payload, Group)
    _done(begun)


# -- one measurement ------------------------------------------------------------------------------


@contextmanager
def _children(commands: list[list[str]], folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    children = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *command, "--join", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for command in commands
    ]
    try:
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait(timeout=10)


def together(commands: list[list[str]], join_file: Path) -> float:
    """Seconds from a common start until the last of the processes has done its work; its end isn't counted."""
    with _children(commands, join_file) as children:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise SystemExit(f"{child.args} did not start")
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        seconds = []
        for child in children:
            told, _ = child.communicate(timeout=DEADLINE_S)
            assert child.returncode == 0
            seconds.append(float(json.loads(told)))
        return max(seconds)


def measure(side: str, case: Case, depth: int, row: int) -> dict[str, float]:
    """Seconds of putting and of taking all groups of a case, on a fresh server."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-bench-") as name,
        running(Path(name), appendfsync=case.appendfsync) as server,
    ):
        join = server.join("bench")
        join_file = Path(name) / "join.json"
        join_file.write_text(json.dumps(asdict(join)))
        if side == "ledger":
            store = connect(join, name="setup")
            problems = 1000
            RunStore(store).put_problems(
                Problem(
                    problem_id=f"bench/{i}",
                    prompt_text="",
                    prompt_tokens=np.zeros(1, np.int32),
                    gold="",
                    data_source="bench",
                    ability="math",
                    trace_ids=(),
                    extra={},
                )
                for i in range(problems)
            )
            ledger = Ledger(store, "setup")
            ledger.create(
                LedgerSettings(
                    sources=(("bench", problems, 1),),
                    seed=1,
                    data_digest="bench",
                    group_size=SAMPLES,
                    groups_per_step=row,
                    max_staleness=case.groups // row,
                    steps=case.groups // row,
                    max_inflight=case.groups,
                )
            )
            assert ledger.new_term() == TERM
        share = str(case.groups // WRITERS)
        sizes = ["--share", share, "--depth", str(depth), "--tokens", str(case.tokens)]
        writers = [["--role", f"put-{side}", "--number", str(i), *sizes] for i in range(WRITERS)]
        reader = ["--role", f"take-{side}", *("--share", str(case.groups)), *("--depth", str(row))]
        put = together(writers, join_file)
        taken = together([reader], join_file)
    return {"put": put, "taken": taken, "both": put + taken}


def run_case(case: Case, pairs: int, depth: int, row: int) -> dict[str, Any]:
    """Interleaved pairs of a case: samples/s of either side, medians, and the ratio."""
    seconds: dict[str, list[dict[str, float]]] = {"ledger": [], "bare": []}
    for pair in range(pairs):
        # Who goes first changes, so that neither always finds the warmer machine.
        for side in ("ledger", "bare") if pair % 2 else ("bare", "ledger"):
            seconds[side].append(measure(side, case, depth, row))
    found: dict[str, Any] = {"name": case.name, "groups": case.groups, "seconds": seconds}
    samples = case.groups * SAMPLES
    for phase in ("put", "taken", "both"):
        medians = {s: statistics.median(m[phase] for m in seconds[s]) for s in seconds}
        found[phase] = {
            "ledger_samples_s": samples / medians["ledger"],
            "bare_samples_s": samples / medians["bare"],
            "ratio": medians["bare"] / medians["ledger"],
            "ratios": [
                bare[phase] / ledger[phase]
                for ledger, bare in zip(seconds["ledger"], seconds["bare"], strict=True)
            ],
        }
    return found


def show(found: dict[str, Any]) -> None:
    """One case's lines."""
    for phase in ("put", "taken", "both"):
        values = found[phase]
        pairs = " ".join(f"{ratio:.2f}" for ratio in values["ratios"])
        print(
            f"| {found['name']:<18}| {phase:<6}| {values['ledger_samples_s']:>8,.0f} | "
            f"{values['bare_samples_s']:>8,.0f} | **{values['ratio']:.2f}** | {pairs} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--depth", type=int, default=8, help="groups of one lease and commit")
    parser.add_argument("--row", type=int, default=16, help="groups of one take and fetch")
    parser.add_argument("--quick", action="store_true", help="few groups, to try it")
    parser.add_argument("--out", type=Path, help="folder for ledger.json")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--join", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        join = JoinInfo(**json.loads(arguments.join.read_text()))
        number, share, depth = arguments.number, arguments.share, arguments.depth
        match arguments.role:
            case "put-ledger":
                put_ledger(join, number, share, depth, arguments.tokens)
            case "put-bare":
                put_bare(join, number, share, depth, arguments.tokens)
            case "take-ledger":
                take_ledger(join, share // depth)
            case "take-bare":
                take_bare(join, share, depth)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{WRITERS} writers, depth {arguments.depth}, rows of {arguments.row}; samples/s\n")
    print("| groups of | | ledger | bare | ratio | pairs |\n|---|---|---|---|---|---|")
    all_found = []
    for case in cases(arguments.quick):
        found = run_case(case, arguments.pairs, arguments.depth, arguments.row)
        show(found)
        all_found.append(found)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "ledger.json").write_text(json.dumps(all_found, indent=1))


if __name__ == "__main__":
    main()
