"""The README's table: every arm of the miniature, over seeds, from real runs.

    .venv/bin/python tests/benchmarks/arms.py                 # all arms, seeds 0 1 2
    .venv/bin/python tests/benchmarks/arms.py --arms luffy --seeds 0

Each arm is a run of the whole system (``tandem start``), or of ``tandem offline`` for SFT,
in a folder of its own under ``--dir``; a run that is finished there is not made again. SFT is
judged by its best checkpoint: three learning rates, evaluated on the held-out problems every
ten updates, the best taken (which favours SFT: it picks on the test set). Prints the
table as Markdown and writes ``table.md`` and ``results.json`` beside the runs. About 20 minutes
on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SFT_LEARNING_RATES = ("2e-4", "5e-4", "1e-3")

ARMS: dict[str, tuple[str, list[str]]] = {
    "luffy": ("start", ["miniature"]),
    "zero": ("start", ["miniature", "reward.own_reward=0"]),
    "on-policy": ("start", ["miniature-on-policy"]),
    **{
        f"sft-{lr}": (
            "offline",
            [
                "miniature-sft",
                f"learner.optimizer.lr={lr}",
                "evaluate.every=10",
                "evaluate.exact=true",
                "evaluate.limit=null",
            ],
        )
        for lr in SFT_LEARNING_RATES
    },
}

ROWS = (
    ("4 expert traces + fresh problems, LUFFY (the main job)", "luffy"),
    ("the same, every own reward forced to 0 (control)", "zero"),
    ("the same problems, on-policy GRPO, no traces", "on-policy"),
    ("SFT on the same 4 traces, best checkpoint of 3 learning rates", "sft"),
)


def run_arm(arm: str, seed: int, root: Path) -> dict[str, Any]:
    """Runs one arm with one seed (or reads it, where it is finished) and returns its figures."""
    command, arguments = ARMS[arm]
    folder = root / f"{arm}-seed{seed}"
    summary = folder / "summary.json"
    if not summary.exists():
        began = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tandem.launch.cli",
                command,
                *arguments,
                f"run.seed={seed}",
                f"run.dir={folder}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed} ended with {done.returncode}:\n{done.stdout}")
        print(f"# {arm} seed {seed}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    figures: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    best = figures["accuracy_after"]
    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            for key, value in record.items():
                if key.startswith("eval/") and key.endswith("/accuracy"):
                    best = max(best, value)
    figures["accuracy_best"] = best
    return figures


def percent(values: list[float]) -> str:
    """``85.0 ± 2.8``, the standard deviation over seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"


def main() -> None:
    """Runs the arms and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, "sft"], default=[*ARMS])
    parser.add_argument("--dir", type=Path, default=Path("runs/arms"))
    options = parser.parse_args()
    arms = [
        name
        for chosen in options.arms
        for name in ([a for a in ARMS if a.startswith("sft-")] if chosen == "sft" else [chosen])
    ]
    options.dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for arm in arms:
        for seed in options.seeds:
            results.setdefault(arm, {})[seed] = run_arm(arm, seed, options.dir)
    (options.dir / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")

    sft = [a for a in results if a.startswith("sft-")]
    if sft:
        # The best over learning rates and checkpoints, seed by seed.
        results["sft"] = {
            seed: max((results[a][seed] for a in sft), key=lambda f: float(f["accuracy_best"]))
            for seed in options.seeds
        }
    lines = [
        f"| arm ({len(options.seeds)} seeds, 500 held-out problems, greedy) | before | after |",
        "|---|---|---|",
    ]
    for title, arm in ROWS:
        if arm not in results:
            continue
        runs = results[arm].values()
        before = percent([r["accuracy_before"] for r in runs])
        after = percent([r["accuracy_best" if arm == "sft" else "accuracy_after"] for r in runs])
        lines.append(f"| {title} | {before} | **{after}** |")
    table = "\n".join(lines)
    (options.dir / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
