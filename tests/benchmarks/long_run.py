"""Opening the records of a long run, as a learner does that resumes, beside reading their bytes.

    .venv/bin/python tests/benchmarks/long_run.py                 # 100,000 steps of 8 groups

Makes a journal and metrics of so many steps in a folder of its own, and opens them in a fresh process:
the journal (every line checked, every step known), the metrics cut back to a checkpoint some steps
before their end, and the evaluations that have been told. Prints seconds of CPU, how many times as long as
reading the same bytes that is, and the memory that the process has grown by; the same for twice the
steps, so that a time that grows faster than the steps is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tandem.common.parts import PartedLines, parts
from tandem.learner.loop.evaluations import recorded_in
from tandem.learner.resume.cut_back import cut_back
from tandem.learner.resume.journal import Journal, digest_of, trained
from tandem.learner.resume.journal_file import encoded

METRICS = {f"train/metric_{number:02d}": 0.123456789 * number for number in range(60)}
BEHIND = 20
"""Steps from the checkpoint to the end."""


def make(folder: Path, steps: int, groups: int) -> None:
    """Writes the records, without waiting for the disk at each."""
    with open(folder / "journal.jsonl", "wb") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "short": False, "groups": [group(step, n) for n in range(groups)]}
            head = {"term": 1, "step": step, "digest": digest_of(row), "time": 1.7e9 + step}
            file.write(encoded({"kind": "row", **head, "row": row}))
            counts = {"samples": 8 * groups, "tokens": 8000 * groups}
            file.write(encoded({"kind": "applied", **head, **counts}))
    lines = PartedLines(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        lines.write({"step": step, "term": 1, "time": 1.7e9 + step, **METRICS})
        if step % 1000 == 0:
            lines.write({"step": step, "eval/id": f"held@{step}", "eval/held/accuracy": 0.5})
    lines.close()


def group(step: int, number: int) -> dict[str, object]:
    """One entry of a row."""
    name = f"{step // 1000}-{step % 1000 * 8 + number}"
    return {"id": name, "attempt": 1, "digest": f"{step:016x}", "bytes": 48123, "traces": []}


def measure(folder: Path, steps: int) -> dict[str, float]:
    """In this process: seconds of each part, and the memory that they took."""
    found: dict[str, float] = {}
    began = time.process_time()
    size = 0
    for path in [folder / "journal.jsonl", *parts(folder / "metrics.jsonl")]:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                size += len(block)
    found["read the bytes"] = time.process_time() - began
    before = memory()

    began = time.process_time()
    journal = Journal(folder / "journal.jsonl")
    assert journal.last_step == steps
    found["open the journal"] = time.process_time() - began
    began = time.process_time()
    cut_back(folder / "metrics.jsonl", steps - BEHIND, folder / "cut")
    assert len(recorded_in(folder / "metrics.jsonl")) == (steps - BEHIND) // 1000
    found["cut the metrics"] = time.process_time() - began
    found["memory, MB"] = (memory() - before) / 1024
    began = time.process_time()
    assert len(trained(folder / "journal.jsonl")) == steps
    found["add up what was trained"] = time.process_time() - began
    journal.close()
    found["size, MB"] = size / 1e6
    return found


def memory() -> int:
    """The most that this process has had, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--measure", metavar="DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure), arguments.steps)))
        return 0
    for steps in (arguments.steps // 2, arguments.steps):
        with tempfile.TemporaryDirectory(prefix="tandem-long-run-") as place:
            make(Path(place), steps, arguments.groups)
            command = [sys.executable, os.path.abspath(__file__), "--steps", str(steps)]
            out = subprocess.run(
                [*command, "--measure", place], check=True, capture_output=True, text=True
            ).stdout
        found = json.loads(out)
        size, grown = found.pop("size, MB"), found.pop("memory, MB")
        floor = found["read the bytes"]
        print(f"{steps:,} steps of {arguments.groups} groups, {size:,.0f} MB")
        for what, seconds in found.items():
            print(f"  {what:<26}{seconds:>8.2f} s {seconds / floor:>8.1f} times")
        print(f"  {'grown by':<26}{grown:>8.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
