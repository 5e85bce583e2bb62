"""Checkpoints are there whole or not at all, and the newest two stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common.errors import FencedError
from tandem.common.records import Version
from tandem.learner.checkpoints import Checkpoints


def save(checkpoints: Checkpoints, step: int, text: str = "weights") -> None:
    def write(folder: Path) -> None:
        (folder / "engine").mkdir()
        (folder / "engine" / "shard.pt").write_text(f"{text} {step}")

    checkpoints.save(Version(term=1, step=step), write, ranks=1, state={"seed": 3})


def steps(checkpoints: Checkpoints) -> list[int]:
    return [c.version.step for c in checkpoints.all()]


def test_the_newest_so_many_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    for step in (3, 6, 9):
        save(checkpoints, step)
    assert steps(checkpoints) == [6, 9]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.version == Version(term=1, step=9)
    assert newest.state == {"seed": 3}
    assert (tmp_path / "LATEST").read_text() == "step-00000009\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "LATEST",
        "step-00000006",
        "step-00000009",
    ]


def test_a_write_that_fails_leaves_the_old_one_and_no_new_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(Version(term=1, step=6), fail, ranks=1, state={})
    assert steps(checkpoints) == [3]
    assert (tmp_path / "LATEST").read_text() == "step-00000003\n"
    again = Checkpoints(tmp_path)
    again.clean()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000003"]


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    save(checkpoints, 6)
    (tmp_path / "step-00000006" / "engine" / "shard.pt").write_text("cut")
    assert steps(checkpoints) == [3]
    (tmp_path / "step-00000003" / "state.json").unlink()
    assert checkpoints.newest() is None


def test_a_learner_that_was_overtaken_moves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)

    def overtaken() -> None:
        raise FencedError("term 1 is over")

    with pytest.raises(FencedError):
        checkpoints.save(
            Version(term=1, step=6), lambda folder: None, ranks=1, state={}, may_finish=overtaken
        )
    assert steps(checkpoints) == [3]


def test_a_step_that_is_saved_again_replaces_the_old_and_what_was_above(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (3, 6):
        save(checkpoints, step)
    save(checkpoints, 3, "other")
    assert steps(checkpoints) == [3]
    assert (tmp_path / "step-00000003" / "engine" / "shard.pt").read_text() == "other 3"
