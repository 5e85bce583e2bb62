"""One flipped bit in each file of a run that was stopped on its way, one file at a time, and then on.

Each time the run is resumed from a copy. It must be refused with the file's name or word of the damage,
or end with a clean audit; what it uses of a damaged file all the same is what docs/status.md says.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit import examine, gather, journal_of
from processes import Run, tandem
from scripted_engine import STEP_SECONDS
from storm import HERE

pytestmark = [pytest.mark.byhand, pytest.mark.timeout(1800)]

SETTINGS = (
    "data.miniature_fresh=63",
    "rollout.workers=1",
    "reward.graders=1",
    "learner.checkpoint_every=3",
)
SEED = int(os.environ.get("TANDEM_FLIP_SEED", "1"))
NOT_READ = ("redis.conf", "lock", "LATEST")
"""Written anew at each start, as the miniature's ``data/`` are, or read by nobody."""
UNDETECTED = ("metrics", "samples", "appendonly", "restarts")
"""A flipped digit or letter in them is a digit or letter; docs/status.md says so."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    patch.setenv(STEP_SECONDS, "0.01")
    folder = tmp_path_factory.mktemp("flips") / "original"
    run = resumed(folder, *SETTINGS)
    try:
        # Twice, so that the journal has two files.
        for rows in (5, 9):
            run.wait_for(lambda rows=rows: rows_of(folder) >= rows, f"row {rows}")
            assert tandem(folder.parent, "stop", str(folder))[0] == 0
            assert run.wait() == 128 + 15
            if rows == 5:
                run = resumed(folder)
        yield folder
    finally:
        run.end()
        patch.undo()


def resumed(folder: Path, *settings: str) -> Run:
    words = ("start", str(HERE / "storm.yaml"), f"run.dir={folder}", *settings)
    return Run(folder.parent, *words)


def rows_of(folder: Path) -> int:
    return sum(record["kind"] == "row" for record in journal_of(folder))


def flip(path: Path, generator: random.Random) -> str:
    data = bytearray(path.read_bytes())
    bit = generator.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit:,} of {8 * len(data):,}"


def test_one_flipped_bit_in_every_file(stopped: Path) -> None:
    generator = random.Random(SEED)
    wrong = []
    files = sorted(
        path.relative_to(stopped)
        for path in stopped.rglob("*")
        if path.is_file() and path.suffix != ".log" and path.stat().st_size
    )
    newest = (stopped / "checkpoints" / "LATEST").read_text().strip()
    for name in files:
        copy = stopped.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(stopped, copy)
        where = flip(copy / name, generator)
        run = resumed(copy)
        try:
            code = run.wait()
        finally:
            run.end()
        said = run.said() + "".join(p.read_text() for p in (copy / "logs").glob("learner-*.log"))
        told = name.name in said or "damaged" in said or "changed: " in said
        verdict = f"{code}, {'told' if told else 'not told'}"
        if code == 0:
            breaches = examine(gather(copy)).breaches
            verdict += f", audit {'clean' if not breaches else breaches[:2]}"
            quiet = (
                name.parts[0] == "data"
                or name.name in NOT_READ
                or name.name.startswith(UNDETECTED)
                # An older checkpoint is read only where the newest is damaged.
                or (name.parts[0] == "checkpoints" and newest not in name.parts)
            )
            if (breaches and not name.name.startswith(UNDETECTED)) or not (told or quiet):
                wrong.append(f"{name}, {where}: {verdict}")
        elif not told:
            wrong.append(f"{name}, {where}: {verdict}: {run.said()[-300:]}")
        print(f"{name!s:<50} {where:<32} {verdict}", flush=True)
    assert wrong == []
