"""The benchmarks of docs/benchmarks.md with an older version of Tandem and with this one, by turns.

    .venv/bin/python tests/benchmarks/versions.py 7e9aa98                         # two hours
    .venv/bin/python tests/benchmarks/versions.py 7e9aa98 --only ledger pool --turns 5

The older version is checked out below ``--dir`` and runs in this environment, each version with its own script, and
with this version's where the older one has none. A benchmark whose script has changed in between says so, since its
versions may not do the same work. Each turn runs both, one after the other, and every second turn the older one last.

Every number that a benchmark prints is compared: the table has the medians of both, their ratio, and the ratio of
each turn. Whether more is better, the figure's name says. Those whose medians differ by more than ``--beyond``
are marked, and behind each benchmark stand the cores that other programs used meanwhile. ``versions.json`` in
``--dir`` has what was printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path("tests/benchmarks")
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "grading": (),
    "environments": ("--models", "3M", "--pairs", "1", "--no-places"),
    "main_job": ("--pairs", "1"),
    "ledger": ("--pairs", "1"),
    "pool": ("--rounds", "1"),
    "engines": ("--models", "3M", "--pairs", "1", "--no-vllm", "--worker-pairs", "0"),
    "weights": ("--models", "3M", "--pairs", "3", "--no-pause"),
    "commit_check": ("--steps", "100", "--staleness", "1", "--dtype", "float32"),
    "learner": ("--models", "3M", "--pairs", "1"),
    "logprobs": ("--tokens", "1024", "--rounds", "1"),
    "ingest": ("--rows", "6000", "--pairs", "1"),
    "growth": (),
    "plan": ("--workers", "1", "--staleness", "1", "--lengths", "40:120:0.5", "--steps", "10"),
    "long_run": ("--steps", "30000"),
}
"""One short run of each; the turns take the place of its pairs."""
LONGEST_S = 1200.0
"""A benchmark that runs longer is ended and told of."""
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")


def figures(text: str) -> dict[str, float]:
    """Every number that a benchmark printed, by a name that it has in each of its outputs.

    In a table the name is the row's first cells that aren't numbers and the column's head, and only a cell's first
    number counts; elsewhere it is the words of its line around it. Where several have one name they are numbered.
    """
    found: dict[str, float] = {}
    seen: Counter[str] = Counter()
    head: list[str] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|---"):
            head = [cell.strip() for cell in before.strip("| ").split("|")]
        before = line
        if line.startswith("|"):
            cells = [cell.strip("* ") for cell in line.strip().strip("|").split("|")]
            numeric = [bool(NUMBER.match(cell)) and " x " not in cell for cell in cells]
            first = numeric.index(True) if True in numeric else len(cells)
            row = " ".join(filter(None, cells[:first]))
            parts = [
                (f"{row}, {head[place] if place < len(head) else place}", cell)
                for place, cell in enumerate(cells[first:], first)
            ]
        else:
            parts = [("", line)]
        for name, words in parts:
            end = 0
            for number in NUMBER.finditer(words):
                around = " ".join([words[end : number.start()], *words[number.end() :].split()[:1]])
                label = name or " ".join(re.findall(r"[^\W\d]+", f"{words[:end]} {around}"))[-60:]
                seen[label] += 1
                place = f" ({seen[label]})" if seen[label] > 1 else ""
                found[label + place] = float(number.group().replace(",", ""))
                end = number.end()
                if name:
                    break
    return found


@dataclass(slots=True, kw_only=True)
class Runs:
    """What one benchmark printed, by version, a text for each turn."""

    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    """Cores that other programs used, by run."""
    short: list[str] = field(default_factory=list)
    """What each run that printed figures and then failed said last: an aim that was missed, most often."""


def run(name: str, words: tuple[str, ...], version: Path) -> tuple[str, float, str]:
    """What a benchmark prints with one version's packages, the cores of others meanwhile, and how it failed, if so.

    One that missed an aim of its own has printed its figures, and fails then.

    Raises:
        RuntimeError: it failed without figures; what it said last is the message.
    """
    env = {**os.environ, "PYTHONPATH": str(version / ".import"), "OMP_NUM_THREADS": "1"}
    script = version / SCRIPTS / f"{name}.py"
    if not script.exists():
        script = ROOT / SCRIPTS / f"{name}.py"
    since, busy = time.monotonic(), busy_s()
    mine = sum(os.times()[:4])
    try:
        done = subprocess.run(
            [sys.executable, str(script), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=env,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{version}: still running after {LONGEST_S:.0f} s") from None
    took = time.monotonic() - since
    others = max(0.0, busy_s() - busy - (sum(os.times()[:4]) - mine)) / took
    said = ""
    if done.returncode:
        said = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]
        said = f"{version}: {said}"
        if not figures(done.stdout):
            raise RuntimeError(said)
    return done.stdout, others, said


def busy_s() -> float:
    """CPU-seconds that all programs of this machine have used."""
    used = psutil.cpu_times()
    return float(used.user + used.system + used.nice)


def script_differs(name: str, older: Path) -> bool:
    """Whether the older version has a script of its own for a benchmark that isn't this one's."""
    script = older / SCRIPTS / f"{name}.py"
    return script.exists() and script.read_bytes() != (ROOT / SCRIPTS / script.name).read_bytes()


def compared(runs: Runs, beyond: float) -> list[str]:
    """A table's rows: the figures that both versions printed in every turn, unless they never differ."""
    olds, news = ([figures(text) for text in texts] for texts in (runs.old, runs.new))
    names = [name for name in news[0] if all(name in one for one in (*olds, *news))]
    rows = []
    for name in names:
        old, new = [one[name] for one in olds], [one[name] for one in news]
        if len({*old, *new}) == 1 or not median(old) or not median(new):
            continue
        ratio = median(new) / median(old)
        turns = " ".join(f"{b / a:.2f}" for a, b in zip(old, new, strict=True) if a)
        bold = "**" if abs(ratio - 1) > beyond else ""
        rows.append(
            f"| {name} | {median(old):,.6g} | {median(new):,.6g} | {bold}{ratio:.2f}{bold} | {turns} |"
        )
    return rows


def main() -> int:
    """Checks the older version out, runs both by turns, and prints a table for each benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("revision", help="the older version: a commit, tag or branch")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--beyond", type=float, default=0.05, help="differences that are marked")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "versions")
    options = parser.parse_args()
    asked = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{options.revision}^{{commit}}"]
    answer = subprocess.run(asked, capture_output=True, text=True)
    if answer.returncode:
        parser.error(f"{options.revision} is no commit of this repository: {answer.stderr.strip()}")
    commit = answer.stdout.strip()
    older = options.dir / commit[:12]
    if not older.exists():
        older.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "-q", "--no-checkout", str(ROOT), str(older)], check=True)
    subprocess.run(["git", "-C", str(older), "checkout", "-q", "--detach", commit], check=True)
    # As set-up does here: else each of its processes compiles what it imports.
    rooms = [str(room.resolve()) for room in (older / ".import" / "tandem").iterdir()]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *rooms], check=True)
    everything: dict[str, dict[str, list[str] | list[float]]] = {}
    failed = []
    for name in options.only:
        runs = Runs()
        sides = [(runs.old, older), (runs.new, ROOT)]
        try:
            for turn in range(options.turns):
                for texts, version in sides if turn % 2 == 0 else sides[::-1]:
                    text, others, said = run(name, BENCHMARKS[name], version)
                    texts.append(text)
                    runs.others.append(others)
                    runs.short += [said] if said else []
        except RuntimeError as error:
            failed.append(f"{name}, {error}")
            continue
        print(f"\n## {name}\n\n| | old | new | new / old | by turn |\n|---|---|---|---|---|")
        print("\n".join(compared(runs, options.beyond)))
        changed = " The script has changed in between." if script_differs(name, older) else ""
        print(f"\nCores of others: {median(runs.others):.2f}.{changed}", flush=True)
        print("".join(f"It failed: {said}\n" for said in runs.short), end="", flush=True)
        everything[name] = {"old": runs.old, "new": runs.new, "others": runs.others}
        (options.dir / "versions.json").write_text(json.dumps(everything), encoding="utf-8")
    for line in failed:
        print(f"not compared: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
