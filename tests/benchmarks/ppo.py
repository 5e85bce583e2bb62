"""PPO with a critic beside GRPO on a task with rewards along the way, at an equal search budget.

    .venv/bin/python tests/benchmarks/ppo.py                     # three rates, two seeds; then five seeds

The miniature's hard chains without traces. Each right running total pays 1/8 at the token that ends it, a right answer
1 at the end: PPO credits each token with its own, GRPO gets the sum. Each objective tries the same three learning rates
with two seeds, and its best one is run with three more seeds. Prints held-out accuracies (greedy, 500 problems) and
seconds of every run. Takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.launch.miniature.tokenizer import VOCABULARY

HERE = Path(__file__).resolve().parent
RATES = (3e-4, 5e-4, 1e-3)
PRESET = """
base: miniature
about: rewards along the way
run:
  steps: {steps}
data:
  miniature_traces: 1
  train:
    - {{path: "{{run}}/data/fresh.parquet", name: fresh}}
expert:
  per_group: 0
reward:
  components:
    - {{name: accuracy}}
    - {{name: "ppo:totals"}}
evaluate:
  every: 0
  at_start: false
"""
SETTINGS = {"grpo": (), "ppo": ("learner.critic.optimizer.lr=1e-3",)}


def totals(
    completion_ids: Sequence[Sequence[int]], prompts: Sequence[str], **columns: Any
) -> list[list[float]]:
    """The reward: 1/k at the second digit of each of a chain's k running totals that is right."""
    return [earned(ids, prompt) for ids, prompt in zip(completion_ids, prompts, strict=True)]


def earned(ids: Sequence[int], prompt: str) -> list[float]:
    """``[L]`` rewards of one response's tokens.

    >>> prompt, text = "49-6+8=?<think>", "49-6=43+8=52"
    >>> earned([VOCABULARY.index(character) for character in text], prompt)
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    chain = prompt.partition("=")[0]
    total = int(chain[:2])
    operands = [int(chain[place : place + 2]) for place in range(2, len(chain), 2)]
    paid, done = [0.0] * len(ids), 0
    tokens = [VOCABULARY[token] for token in ids]
    for place, token in enumerate(tokens):
        if token == "=" and done < len(operands):
            total = (total + operands[done]) % 100
            done += 1
            if "".join(tokens[place + 1 : place + 3]) == f"{total:02d}":
                paid[place + 2] = 1.0 / len(operands)
    return paid


def run(folder: Path, objective: str, rate: float, seed: int) -> tuple[float, float]:
    """One run: held-out accuracy, and seconds."""
    name = f"{objective}-{rate:g}-{seed}"
    path = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    settings = [
        f"learner.objective.name={objective}",
        f"learner.optimizer.lr={rate}",
        f"run.seed={seed}",
        f"run.dir={name}",
        *SETTINGS[objective],
    ]
    subprocess.run(
        [sys.executable, "-m", "tandem.launch", "start", "along.yaml", *settings],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=1800,
    )
    summary = json.loads((folder / name / "summary.json").read_text())
    return summary["accuracy_after"], summary["wall_seconds"]


def main() -> None:
    """Searches, runs the best, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-ppo-") as place:
        folder = Path(place)
        (folder / "along.yaml").write_text(PRESET.format(steps=options.steps))
        for objective in SETTINGS:
            found = {
                rate: [run(folder, objective, rate, seed) for seed in (0, 1)] for rate in RATES
            }
            best = max(RATES, key=lambda rate: sum(one for one, _ in found[rate]))
            for rate, results in found.items():
                print(f"{objective:5} lr {rate:g}: {_text(results)}", flush=True)
            final = [*found[best], *(run(folder, objective, best, seed) for seed in (2, 3, 4))]
            mean = statistics.mean(one for one, _ in final)
            spread = statistics.stdev(one for one, _ in final)
            line = f"{objective:5} best, lr {best:g}: {mean:.1%} ± {spread:.1%}"
            print(f"{line}: {_text(final)}", flush=True)


def _text(results: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{accuracy:.1%} in {seconds:.0f} s" for accuracy, seconds in results)


if __name__ == "__main__":
    main()
