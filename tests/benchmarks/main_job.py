"""Wall time per update of the running system beside a loop in one process.

    .venv/bin/python tests/benchmarks/main_job.py            # 5 interleaved pairs

Each pair is one run of the whole system (``tandem start``, the main job's preset, staleness at least 1)
and one run of :mod:`single_process`, one after the other on the same machine, over the same number of
updates. The system's seconds per update are taken between the records of two steps in its
``metrics.jsonl``, so that neither side counts its start-up; evaluations in between are off in
both. Prints each pair, the medians, their ratio, how fast the worker samples beside the loop, and the share of
time that the system's actor and learner idle and for whom. Writes ``main_job.json`` beside the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = ["evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false"]
SKIPPED = 10
"""First updates left out on both sides: warm-up."""
HERE = Path(__file__).resolve().parent


def one_thread() -> dict[str, str]:
    """The environment of a process with one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def system(steps: int, folder: Path, preset: str, overrides: list[str]) -> dict[str, Any]:
    """One run of the whole system: seconds per update and who waited for whom."""
    subprocess.run(
        [
            *(sys.executable, "-m", "tandem.launch.cli", "start", preset),
            *(f"run.dir={folder}", f"run.steps={steps}", *SETTINGS, *overrides),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=900,
    )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [r for r in map(json.loads, lines) if "train/loss" in r]
    kept = [r for r in records if r["step"] >= SKIPPED]
    seconds = (kept[-1]["time"] - kept[0]["time"]) / (kept[-1]["step"] - kept[0]["step"])
    shares: dict[str, float] = {}
    for key in sorted({k for r in kept for k in r if k.startswith("time/")}):
        shares[key] = statistics.mean(r.get(key, 0.0) for r in kept[1:])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "seconds": seconds,
        "learner": shares,
        "idle_shares": summary.get("idle_shares", {}),
        "staleness": statistics.mean(r.get("replay/staleness_mean", 0.0) for r in kept),
        "rewarded": statistics.mean(r.get("reward/mean", 0.0) for r in kept),
    }


def loop(steps: int, preset: str, overrides: list[str]) -> dict[str, Any]:
    """One run of the loop: seconds per update and of its parts."""
    done = subprocess.run(
        [
            *(sys.executable, str(HERE / "single_process.py")),
            *("--preset", preset, "--steps", str(steps), *overrides),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=one_thread(),
        timeout=900,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    means = {
        name: statistics.mean(values[SKIPPED:])
        for name, values in found.items()
        if isinstance(values, list)
    }
    return {"seconds": means.pop("update"), "parts": means}


def busy_seconds(found: dict[str, Any]) -> float:
    """Seconds an update in which the worker isn't idle: it samples, loads weights and talks to the others."""
    idle = found["idle_shares"]["rollout"]
    return float(found["seconds"] * (1 - idle))


def main() -> None:
    """Runs the pairs and prints what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--preset", default="miniature")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmark-main-job"))
    parser.add_argument("overrides", nargs="*", help="key=value, for both sides")
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        folder = options.dir / f"pair{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        overrides = [f"run.seed={number}", *options.overrides]

        def run_loop(overrides: list[str] = overrides) -> dict[str, Any]:
            return loop(options.steps, options.preset, [f"run.steps={options.steps}", *overrides])

        # Which side goes first alternates, so that a drift of the machine falls on both.
        first = run_loop() if number % 2 else None
        ours = system(options.steps, folder, options.preset, overrides)
        theirs = first or run_loop()
        pairs.append({"system": ours, "loop": theirs})
        print(
            f"pair {number}: system {1e3 * ours['seconds']:.1f} ms, loop "
            f"{1e3 * theirs['seconds']:.1f} ms an update, "
            f"ratio {ours['seconds'] / theirs['seconds']:.2f}",
            flush=True,
        )
    ours_median = statistics.median(p["system"]["seconds"] for p in pairs)
    theirs_median = statistics.median(p["loop"]["seconds"] for p in pairs)
    print(
        f"medians: system {1e3 * ours_median:.1f} ms, loop {1e3 * theirs_median:.1f} ms an update; "
        f"ratio {ours_median / theirs_median:.2f} ({platform.machine()}, {os.cpu_count()} cores)"
    )
    busy = statistics.median(busy_seconds(p["system"]) for p in pairs)
    alone = statistics.median(p["loop"]["parts"]["sample"] for p in pairs)
    print(
        f"an update's samples: the loop takes {1e3 * alone:.1f} ms, the worker is busy for {1e3 * busy:.1f} ms, "
        f"which is {alone / busy:.2f} of the loop's speed"
    )
    print("the loop's seconds by part, mean:")
    for name in pairs[0]["loop"]["parts"]:
        share = statistics.mean(p["loop"]["parts"][name] for p in pairs)
        print(f"  {name:<8} {1e3 * share:6.1f} ms")
    print("the learner's seconds by activity, mean an update (wait/… is idle, and for whom):")
    for name in sorted({n for p in pairs for n in p["system"]["learner"]}):
        spent = statistics.mean(p["system"]["learner"].get(name, 0.0) for p in pairs)
        print(f"  {name:<24} {1e3 * spent:6.1f} ms")
    print("idle shares of the processes, and the mean staleness of what was trained on:")
    for name in sorted({n for p in pairs for n in p["system"]["idle_shares"]}):
        share = statistics.mean(p["system"]["idle_shares"].get(name, 0.0) for p in pairs)
        print(f"  {name:<24} {100 * share:5.0f} %")
    print(
        f"  staleness                {statistics.mean(p['system']['staleness'] for p in pairs):.2f}"
    )
    (options.dir / "main_job.json").write_text(json.dumps(pairs, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
