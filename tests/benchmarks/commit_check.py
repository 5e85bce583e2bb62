"""False alarms of the check of new weights and of the ratio check, and what the former costs.

    .venv/bin/python tests/benchmarks/commit_check.py                  # 1,000 updates of each
    .venv/bin/python tests/benchmarks/commit_check.py --steps 100 --staleness 1 --dtype float32

Runs the whole system (``tandem start miniature``) at each staleness with engines in each dtype, and
prints for each run how many versions were checked, how many failed, how near to their bound the
others came, in how many updates the ratio check alarmed, and the share of the learner's and the
engines' time that the check of new weights took. A run lasts some minutes; one false alarm ends with
exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tandem.common.ratio_check import alarm_of

SETTINGS = (
    "evaluate.every=0",
    "evaluate.at_start=false",
    "evaluate.at_end=false",
    "data.miniature_fresh=20000",
)


def figures(folder: Path) -> dict[str, float]:
    """What a finished run's records say of the checks of its versions.

    ``updates`` and ``checks``, how many ``failed`` and how many updates had an alarm of the ratio check
    (``alarms``), how near to its bound the nearest check came that passed (``nearest``, a share), the
    learner's seconds for scoring and their share of its time (``score_seconds``, ``score_share``), and the
    worker's for a check (``check_seconds``).
    """
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "train/loss" in record]

    def every(name: str) -> list[float]:
        return [record[name] for record in records if record.get(name) is not None]

    return {
        "updates": len(records),
        "checks": sum(every("weights/checks")),
        "failed": sum(every("weights/checks_failed")),
        "alarms": sum(alarm > 0 for alarm in every("ratio/alarm")),
        "nearest": max(every("weights/check_nearness"), default=0.0),
        "score_seconds": statistics.median(every("time/score") or [0.0]),
        "score_share": sum(every("time/score")) / max(sum(every("time/total")), 1e-9),
        "check_seconds": statistics.median(every("weights/check_seconds") or [0.0]),
    }


def complaints(folder: Path) -> list[str]:
    """Lines of a finished run about failed checks and about alarms of the ratio check."""
    found = []
    for log in sorted((folder / "logs").glob("rollout-*.log")):
        texts = log.read_text(encoding="utf-8").splitlines()
        found += [text for text in texts if "isn't what the learner published" in text]
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "train/loss" in record and (alarm := alarm_of(record)):
            found.append(f"step {record['step']}: {alarm}")
    return found


def run(folder: Path, steps: int, staleness: int, dtype: str) -> tuple[str, float]:
    """A line of the table, and how many false alarms there were."""
    own = [f"replay.max_staleness={staleness}", f"rollout.dtype={dtype}"]
    if staleness > 1:
        # Samples then run on while the weights change.
        own.append("rollout.update_wait_seconds=0")
    command = (sys.executable, "-m", "tandem.launch.cli", "start", "miniature", "--plain")
    subprocess.run(
        [*command, f"run.dir={folder}", f"run.steps={steps}", *SETTINGS, *own],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print("".join(f"{text}\n" for text in complaints(folder)), end="", flush=True)
    found = figures(folder)
    line = (
        f"{staleness:>9} {dtype:>9} {found['updates']:>8} {found['checks']:>7.0f} "
        f"{found['failed']:>7.0f} {found['alarms']:>7} {found['nearest']:>8.2f} "
        f"{1e3 * found['score_seconds']:>9.1f} {found['score_share']:>8.1%} "
        f"{1e3 * found['check_seconds']:>9.1f}"
    )
    return line, found["failed"] + found["alarms"]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=1000, help="updates of each run")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    print(
        f"{'staleness':>9} {'engines':>9} {'updates':>8} {'checks':>7} {'failed':>7} {'ratios':>7} {'nearest':>8} "
        f"{'learner':>12} {'':>5} {'worker':>9}\n{'':>61} {'ms':>9} {'of time':>8} {'ms':>9}"
    )
    failures = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for staleness in arguments.staleness:
            for dtype in arguments.dtype:
                place = Path(folder) / f"{staleness}-{dtype}"
                line, failed = run(place, arguments.steps, staleness, dtype)
                failures += failed
                print(line, flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
