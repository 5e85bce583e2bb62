"""What `miniature-tools` shows, with its controls: four jobs of the whole system, and one table.

    .venv/bin/python tests/benchmarks/tools.py                    # the job and its controls, seed 0
    .venv/bin/python tests/benchmarks/tools.py --seeds 0 1 2

All four have the same model, problems, steps and settings, but for one thing:

- the tool is taken away: the environment has none, and the prompt names none;
- the results are falsified: the calculator answers, and never with the product;
- every reward is forced to 0.

Each is a run (`tandem start`) in a folder of its own under `--dir`; a run that is finished there is not made
again. The command ends with 1 where the table doesn't show what it must (`ARMS`). Further words are
overrides for all of them. A few minutes for each seed, on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

PRESET = "miniature-tools"
# A gate that nothing passes: reward.own_reward=0 is refused where no group could then teach anything.
NO_REWARDS = (
    "reward.components=[{name: accuracy}, "
    "{name: format, weight: 0.0, gate: true, params: {pattern: no answer has this form}}]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the jobs."""

    title: str
    """What the table calls it."""
    overrides: tuple[str, ...]
    """How it differs from the preset."""
    at_least: float = 0.0
    """Held-out accuracy afterwards that the job must reach."""
    at_most: float = 1.0
    """Held-out accuracy afterwards that a control must not exceed."""


ARMS = {
    "job": Arm(title="`miniature-tools`", overrides=(), at_least=0.7),
    "no-tool": Arm(
        title="the tool taken away",
        overrides=("environments.default=no_calculator",),
        at_most=0.2,
    ),
    "false-results": Arm(
        title="its results falsified",
        overrides=("environments.default=false_calculator",),
        at_most=0.2,
    ),
    "no-rewards": Arm(
        title="every reward forced to 0",
        overrides=(NO_REWARDS,),
        at_most=0.2,
    ),
}
BEFORE_AT_MOST = 0.1
"""Held-out accuracy of the base model that no arm may exceed."""


def run_arm(name: str, seed: int, root: Path, overrides: list[str]) -> dict[str, Any]:
    """Runs one arm with one seed (or reads it, where it is finished) and returns its figures."""
    folder = root / f"{name}-seed{seed}"
    summary = folder / "summary.json"
    if not summary.exists():
        began = time.monotonic()
        words = [PRESET, *ARMS[name].overrides, *overrides, f"run.seed={seed}", f"run.dir={folder}"]
        done = subprocess.run(
            [sys.executable, "-m", "tandem.launch.cli", "start", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            raise SystemExit(f"{name}, seed {seed} ended with {done.returncode}:\n{done.stdout}")
        print(f"# {name} seed {seed}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    figures: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    return figures


def percent(shares: list[float]) -> str:
    """``85.0``, or ``85.0 ± 2.8`` with the standard deviation where there are several."""
    text = f"{100 * mean(shares):.1f}"
    return f"{text} ± {100 * stdev(shares):.1f}" if len(shares) > 1 else text


def amiss(name: str, before: list[float], after: list[float]) -> list[str]:
    """What an arm's figures don't show of what they must, in words."""
    arm = ARMS[name]
    found = []
    if max(before) > BEFORE_AT_MOST:
        found.append(f"{arm.title}: {max(before):.1%} before is more than {BEFORE_AT_MOST:.0%}")
    if min(after) < arm.at_least:
        found.append(f"{arm.title}: {min(after):.1%} is less than {arm.at_least:.0%}")
    if max(after) > arm.at_most:
        found.append(f"{arm.title}: {max(after):.1%} is more than {arm.at_most:.0%}")
    return found


def main() -> int:
    """Runs the arms, prints the table, and says what it doesn't show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--dir", type=Path, default=Path("runs/tools"))
    options, overrides = parser.parse_known_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    lines = [
        f"| held-out problems right, greedy, seed {', '.join(map(str, options.seeds))} | before | after |",
        "|---|---|---|",
    ]
    complaints: list[str] = []
    for name in options.arms:
        runs = [run_arm(name, seed, options.dir, overrides) for seed in options.seeds]
        before = [float(run["accuracy_before"]) for run in runs]
        after = [float(run["accuracy_after"]) for run in runs]
        lines.append(f"| {ARMS[name].title} | {percent(before)} | **{percent(after)}** |")
        complaints += amiss(name, before, after)
    table = "\n".join(lines)
    (options.dir / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    for complaint in complaints:
        print(f"not as it should be: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
