"""What more problems cost: the first lease, a group's calls, a worker's memory, bytes of Redis, and the ingest.

    .venv/bin/python tests/benchmarks/growth.py            # 1,000, 100,000 and 1,000,000 problems

For each size a fresh redis-server is given that many problems, and a fresh process, which has imported
all that it needs, then makes its first lease of 8 groups and reads their problems. It prints how long that took,
the longest time for which one command blocked Redis meanwhile, by how much the process has grown, and the
medians of 50 more rounds of lease, commit and take. Bytes of Redis are those of ``used_memory`` less the prompts'
text, their tokens (4 bytes each) and the gold answers. The last lines say how many rows a second the ingest of a run
reads, checks, and puts into Redis, without traces to grade (``--rows``).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict, replace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from ledger import make_group  # noqa: E402 - of this folder
from redis_server import running  # noqa: E402 - of the folder above

from tandem.common.records import Problem, Version  # noqa: E402
from tandem.common.run_folder import JoinInfo, RunFolder  # noqa: E402
from tandem.replay.connection import connect  # noqa: E402
from tandem.replay.ledger import Ledger  # noqa: E402
from tandem.replay.ledger_records import LedgerSettings, Row  # noqa: E402
from tandem.replay.store import RunStore  # noqa: E402

GROUPS = 8
ROUNDS = 50
PROMPT = "Natalia sold {} clips in April, and half as many in May. How many did she sell in both? "


def problems(count: int) -> Iterator[Problem]:
    """Problems with prompts of about 90 characters and 24 tokens."""
    for number in range(count):
        yield Problem(
            problem_id=f"fresh/{number}",
            prompt_text=PROMPT.format(number),
            prompt_tokens=np.arange(24, dtype=np.int32),
            gold=str(number),
            data_source="gsm8k",
            ability="math",
            trace_ids=(),
            extra={},
        )


def of_the_prompts(count: int) -> int:
    """Bytes of the prompts and gold answers themselves."""
    numbers = sum(len(str(number)) for number in range(count))
    return count * (len(PROMPT) - 2 + 4 * 24) + 2 * numbers


def settings(size: int) -> LedgerSettings:
    return LedgerSettings(
        sources=(("fresh", size, 1),),
        seed=7,
        data_digest="d",
        group_size=8,
        groups_per_step=GROUPS,
        max_staleness=ROUNDS + 1,
        steps=10**6,
    )


def resident() -> float:
    """Megabytes that this process holds."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def worker(join: JoinInfo) -> None:
    """Leases, commits and takes; prints the seconds of each, and what the process holds."""
    group = make_group(74)
    store = connect(join, name="rollout-0")
    ledger, runs = Ledger(store, "rollout-0"), RunStore(store)
    before = resident()
    store.redis.config_set("slowlog-log-slower-than", 0)
    store.redis.slowlog_reset()
    spent: dict[str, list[float]] = {"lease": [], "commit": [], "take": []}
    for step in range(1, ROUNDS + 2):
        begun = time.perf_counter()
        leases = ledger.lease(Version(term=1, step=step - 1), GROUPS).leases
        assert len(leases) == GROUPS
        runs.problems([lease.problem_id for lease in leases])
        leased = time.perf_counter()
        if step == 1:
            first = leased - begun
            blocked = max(entry["duration"] for entry in store.redis.slowlog_get(10_000)) / 1e3
        named = [replace(group, group_id=one.group_id, attempt=one.attempt) for one in leases]
        ledger.commit_many(named)
        committed = time.perf_counter()
        row = ledger.take(step, 1)
        assert isinstance(row, Row)
        ledger.confirm(step, 1)
        times = leased - begun, committed - leased, time.perf_counter() - committed
        if step > 1:
            for name, seconds in zip(spent, times, strict=True):
                spent[name].append(seconds)
        ledger.durable(step, 1)
    medians = {name: 1e3 * statistics.median(some) for name, some in spent.items()}
    print(
        json.dumps(
            {"first lease": 1e3 * first, "blocked": blocked, "grown": resident() - before} | medians
        )
    )


def of_size(size: int) -> dict[str, float]:
    """The figures of a ledger of so many problems."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-growth-") as folder,
        running(Path(folder)) as server,
    ):
        join = server.join("growth")
        store = connect(join, name="ingest")
        empty = store.redis.info("memory")["used_memory"]
        begun = time.perf_counter()
        RunStore(store).put_problems(problems(size))
        put = time.perf_counter() - begun
        held = store.redis.info("memory")["used_memory"] - empty
        ledger = Ledger(store, "supervisor")
        ledger.create(settings(size))
        ledger.new_term()
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(join))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        store.close()
        return {
            **json.loads(done.stdout),
            "put": size / put,
            "bytes": (held - of_the_prompts(size)) / size,
        }


def rows_a_second(count: int) -> dict[str, float]:
    """Rows a second of reading, and of reading and putting, for fresh problems of the miniature."""
    from tandem.launch.ingest.load import load
    from tandem.launch.ingest.prepare import prepare
    from tandem.launch.miniature.parquet import write
    from tandem.launch.run.opened.presets import load as preset

    # As the ingest's own process does.
    sys.modules["torch"] = None  # type: ignore[assignment]
    gc.disable()
    with tempfile.TemporaryDirectory(prefix="tandem-growth-") as temporary:
        folder = Path(temporary)
        write(folder / "data", "hard", seed=0, traces=4, fresh=count, train=1)
        config, few = (
            preset("miniature-on-policy").resolve(
                [
                    "data.miniature=null",
                    f"data.train=[{{path: {folder}/data/fresh.parquet, limit: {limit}}}]",
                    f"data.evaluate=[{{path: {folder}/data/heldout.parquet}}]",
                    f"run.dir={folder}/run",
                ]
            )
            for limit in (count, 100)
        )
        prepare(few, RunFolder(folder / "run"))  # imports
        begun = time.perf_counter()
        found = prepare(config, RunFolder(folder / "run"))
        read = time.perf_counter() - begun
        with running(folder) as server:
            store = connect(server.join("growth"), name="ingest")
            begun = time.perf_counter()
            load(Ledger(store, "supervisor"), RunStore(store), config, found)
            put = time.perf_counter() - begun
            store.close()
    return {"read": count / read, "put": count / put, "both": count / (read + put)}


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**5, 10**6])
    parser.add_argument("--rows", type=int, default=50_000, help="of the ingest; 0 = leave it out")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(JoinInfo(**json.loads(arguments.worker)))
        return 0
    names: dict[str, tuple[str, str]] = {
        "first lease": ("first lease, ms", "{:.1f}"),
        "blocked": ("one command of it, ms", "{:.1f}"),
        "lease": ("lease of 8, ms", "{:.2f}"),
        "commit": ("commit of 8, ms", "{:.2f}"),
        "take": ("take and confirm, ms", "{:.2f}"),
        "grown": ("worker's growth, MB", "{:.1f}"),
        "bytes": ("bytes a problem", "{:.0f}"),
        "put": ("put, problems/s", "{:,.0f}"),
    }
    print("".join([f"{'problems':<24}", *(f"{size:>12,}" for size in arguments.sizes)]))
    found: list[dict[str, Any]] = [of_size(size) for size in arguments.sizes]
    for name, (label, form) in names.items():
        print(f"{label:<24}" + "".join(f"{form.format(one[name]):>12}" for one in found))
    if arguments.rows:
        rates = rows_a_second(arguments.rows)
        print(
            f"ingest of {arguments.rows:,} rows: {rates['both']:,.0f} rows/s (read and checked "
            f"{rates['read']:,.0f}, put {rates['put']:,.0f})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
