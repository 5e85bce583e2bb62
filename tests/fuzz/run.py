"""Fuzzes every decoder with mutated frames and every script with mutated calls; prints a table.

``python tests/fuzz/run.py --frames 100000 --calls 100000 --seed 1`` exits with 1 on any breach: an
error without a name, an answer that can't be, a state that mustn't be, a hang, or memory that a
small frame shouldn't take.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# This checkout's own code, wherever the command was started.
sys.path[:0] = [str(HERE), str(HERE.parent.parent / ".import"), str(HERE.parent)]

from redis_server import running  # noqa: E402
from scripts import ScriptFuzz, Tally  # noqa: E402

from tandem.replay.connection import connect, script_names  # noqa: E402


def fuzz_scripts(names: list[str], count: int, seed: int) -> list[Tally]:
    """So many calls of each script on a server of their own."""
    tallies = []
    with (
        tempfile.TemporaryDirectory(prefix="tandem-fuzz-") as folder,
        running(Path(folder), appendonly="no") as server,
    ):
        store = connect(server.join("fuzz"), name="fuzz")
        fuzz = ScriptFuzz(store, seed)
        for name in names:
            tallies.append(fuzz.run(name, count))
            show(tallies[-1])
        store.close()
    return tallies


def show(tally: Tally) -> None:
    """One line of the table, and its breaches."""
    errors = " ".join(f"{name}={n}" for name, n in tally.errors.most_common(4))
    print(
        f"{tally.name:24} {tally.cases:8} {tally.fine:8} {tally.changed:8} "
        f"{len(tally.breaches):8} {tally.seconds:7.1f}  {errors}",
        flush=True,
    )
    for line in tally.breaches:
        print(f"    BREACH {line}", flush=True)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=2000, help="mutated frames per decoder")
    parser.add_argument("--calls", type=int, default=2000, help="mutated calls per script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of decoders or scripts")
    given = parser.parse_args()
    wanted = lambda name: not given.only or name in given.only  # noqa: E731
    print(f"seed {given.seed}")
    print(
        f"{'target':24} {'cases':>8} {'fine':>8} {'changed':>8} {'breaches':>8} {'seconds':>7}  errors"
    )
    tallies = []
    if given.calls:
        tallies += fuzz_scripts([n for n in script_names() if wanted(n)], given.calls, given.seed)
    broken = sum(bool(tally.breaches) for tally in tallies)
    print(
        f"{len(tallies)} targets, {sum(t.cases for t in tallies):,} cases, {broken} with breaches"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
