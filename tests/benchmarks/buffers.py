"""The ledger beside Trinity-RFT's buffers and a bare Redis client, on the same groups of samples.

    .venv/bin/python tests/benchmarks/buffers.py           # about ten minutes; makes runs/trinity the first time

Four writers put all groups, then one reader takes them all, in rows of 16. Every side gets samples of the same
tokens, log-probs, texts and rewards.

============  =====================================================================================
ledger        Tandem's: lease, commit in batches, take, fetch, confirm
bare          Redis alone: pipelined SET and GET of the same encoded groups
queue         Trinity-RFT's default buffer: a queue in an actor of Ray that keeps a copy in SQLite
sql           Trinity-RFT's table in SQLite, written and read through an actor of Ray
============  =====================================================================================

Trinity-RFT runs in a virtual environment of its own (``--trinity``), with the packages that its buffers import. Of
either side nothing is lost when a process is killed, but only the ledger gives each group out once, counts its
attempts and gives back what a dead worker held. Prints samples/s: medians of interleaved rounds, and the ledger's
rate over each other one's.
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
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from ledger import SAMPLES, WRITERS, Case, make_group, measure  # noqa: E402 - beside this file
from peers import environment  # noqa: E402

TRINITY = "0.6.0"
NEEDED = (
    *("ray>=2.50", "sqlalchemy", "aiosqlite", "greenlet", "tensordict", "omegaconf", "datasets"),
    *("transformers<5.20", "math_verify", "latex2sympy2_extended", "networkx", "fire", "requests"),
    *("openai", "jsonlines", "sortedcontainers", "word2number", "matplotlib", "psutil"),
    *("pybase64", "typer", "safetensors"),
)
"""What the buffers of Trinity-RFT import: its wheel asks for verl and a GPU's packages besides."""
OURS = ("ledger", "bare")
DEADLINE_S = 600.0


def measure_trinity(python: Path, kind: str, case: Case, depth: int, row: int) -> dict[str, float]:
    """Seconds of putting and of taking all groups of a case through one of Trinity's buffers."""
    group = make_group(case.tokens)
    with tempfile.TemporaryDirectory(prefix="buffers-") as folder:
        path = Path(folder) / "group.npz"
        np.savez(
            path,
            prompt=group.prompt_tokens,
            tokens=np.stack([sample.tokens for sample in group.samples]),
            logprobs=np.stack([sample.logprobs for sample in group.samples]),
            text=np.array(
                [np.frombuffer(sample.text.encode(), np.uint8) for sample in group.samples]
            ),
        )
        sizes = {"groups": case.groups, "writers": WRITERS, "depth": depth, "row": row}
        done = subprocess.run(
            [
                *(str(python), str(HERE / "buffers_trinity.py"), str(path), "--kind", kind),
                *(word for name, size in sizes.items() for word in (f"--{name}", str(size))),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=DEADLINE_S,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=8, help="groups that a writer puts at a time")
    parser.add_argument("--row", type=int, default=16, help="groups of one read")
    parser.add_argument("--tokens", type=int, nargs="+", default=[74, 2048], help="of a sample")
    parser.add_argument("--trinity", type=Path, default=ROOT / "runs" / "trinity")
    asked = parser.parse_args()
    bare = ["--no-deps", f"trinity-rft=={TRINITY}"]
    python = environment(asked.trinity, f"Trinity-RFT {TRINITY}", NEEDED, bare)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{WRITERS} writers, depth {asked.depth}, rows of {asked.row}; samples/s\n")
    sides = ("ledger", "bare", "queue", "sql")
    print(f"| groups of | | {' | '.join(sides)} | ledger over queue | over sql |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in asked.tokens:
        short = tokens < 1000
        sizes = {True: 4096 if short else 256, False: 256 if short else 128}
        of = {
            side: Case(
                name=f"8 x {tokens:,} tokens",
                tokens=tokens,
                # Enough for some seconds of either.
                groups=sizes[side in OURS],
                appendfsync="no",
            )
            for side in sides
        }
        seconds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(asked.rounds):
            # Who goes first changes, so that none always finds the warmer machine.
            for side in sides[number % 4 :] + sides[: number % 4]:
                seconds[side].append(
                    measure(side, of[side], asked.depth, asked.row)
                    if side in OURS
                    else measure_trinity(python, side, of[side], asked.depth, asked.row)
                )
        for phase in ("put", "taken", "both"):
            rate = {
                side: case.groups * SAMPLES / statistics.median(m[phase] for m in seconds[side])
                for side, case in of.items()
            }
            rates = " | ".join(f"{rate[side]:,.0f}" for side in sides)
            ratios = " | ".join(f"**{rate['ledger'] / rate[side]:.1f}**" for side in sides[2:])
            print(f"| {of['ledger'].name} | {phase} | {rates} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
