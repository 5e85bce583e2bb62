"""Fuzzes every decoder with mutated frames and every script with mutated calls; prints a table.

``python tests/fuzz/run.py --frames 100000 --calls 100000 --seed 1`` exits with 1 on any breach: an
error without a name, a record or an answer that can't be, a state that mustn't be, a hang, or memory
that a small frame shouldn't take.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
# This checkout's own code, wherever the command was started.
sys.path[:0] = [str(HERE), str(HERE.parent.parent / ".import"), str(HERE.parent)]

from decoders import all_decoders  # noqa: E402
from decoding import fuzz_decoder  # noqa: E402
from file_decoders import Files  # noqa: E402
from redis_server import running  # noqa: E402
from scripts import ScriptFuzz  # noqa: E402
from tally import HEAD, Tally, line  # noqa: E402

from tandem.replay.connection import connect, script_names  # noqa: E402


def fuzz_decoders(wanted: Callable[[str], bool], count: int, seed: int) -> list[Tally]:
    """So many mutated frames for each decoder."""
    tallies = []
    with Files() as files:
        for decoder in all_decoders(files):
            if wanted(decoder.name):
                tallies.append(fuzz_decoder(decoder, count, seed))
                print(line(tallies[-1]), flush=True)
    return tallies


def fuzz_scripts(wanted: Callable[[str], bool], count: int, seed: int) -> list[Tally]:
    """So many mutated calls of each script, on a server of their own."""
    tallies = []
    with (
        tempfile.TemporaryDirectory(prefix="tandem-fuzz-") as folder,
        running(Path(folder), appendonly="no") as server,
    ):
        store = connect(server.join("fuzz"), name="fuzz")
        fuzz = ScriptFuzz(store, seed)
        for name in filter(wanted, script_names()):
            tallies.append(fuzz.run(name, count))
            print(line(tallies[-1]), flush=True)
        store.close()
    return tallies


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Mutated frames and calls; see the module's text.")
    parser.add_argument("--frames", type=int, default=2000, help="mutated frames per decoder")
    parser.add_argument("--calls", type=int, default=2000, help="mutated calls per script")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same cases")
    parser.add_argument("--only", nargs="*", default=[], help="names of decoders or scripts")
    given = parser.parse_args()

    def wanted(name: str) -> bool:
        return not given.only or name in given.only

    begun = time.monotonic()
    print(f"seed {given.seed}\n{HEAD}", flush=True)
    tallies = []
    if given.frames:
        tallies += fuzz_decoders(wanted, given.frames, given.seed)
    if given.calls:
        tallies += fuzz_scripts(wanted, given.calls, given.seed)
    broken = sum(bool(tally.breaches) for tally in tallies)
    print(
        f"{len(tallies)} targets, {sum(t.cases for t in tallies):,} cases, {broken} with breaches, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
