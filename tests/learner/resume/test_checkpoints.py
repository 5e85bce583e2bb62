"""Checkpoints are there whole or not at all, and the newest two stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.common.errors import FencedError
from tandem.common.records import Version
from tandem.common.run_folder import write_atomic
from tandem.learner.resume import checkpoints as module
from tandem.learner.resume.checkpoints import Checkpoints


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


def test_what_a_killed_save_has_left_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)

    def killed(path: Path, content: str) -> None:
        if path.name == "LATEST":
            path.with_name(f".{path.name}.4711").write_text(content)
            raise KeyboardInterrupt
        write_atomic(path, content)

    monkeypatch.setattr(module, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 6)
    monkeypatch.undo()
    again = Checkpoints(tmp_path)
    again.clean()
    newest = again.newest()
    assert newest is not None
    again.point_to(newest.folder)
    assert (tmp_path / "LATEST").read_text() == "step-00000006\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "LATEST",
        "step-00000003",
        "step-00000006",
    ]


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


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_one_flipped_bit_anywhere_makes_the_one_before_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(Checkpoints(tmp_path), 3)
    save(Checkpoints(tmp_path), 6)
    folder = tmp_path / "step-00000006"
    for path in (folder / "engine" / "shard.pt", folder / "state.json"):
        for bit in range(8 * path.stat().st_size):
            flip(path, bit)
            caplog.clear()
            found = Checkpoints(tmp_path).newest()
            if found is not None and found.version.step == 6:
                # White space of the JSON became other white space.
                assert path.name == "state.json"
                assert json.loads(path.read_text())
                assert found.state == {"seed": 3}
            else:
                assert found is not None, (path, bit)
                assert found.version.step == 3
                assert "left out a checkpoint" in caplog.text
                assert str(folder) in caplog.text
            flip(path, bit)
    whole = Checkpoints(tmp_path).newest()
    assert whole is not None
    assert whole.version.step == 6


def test_a_damaged_one_is_none_of_those_that_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    save(checkpoints, 3)
    save(checkpoints, 6)
    flip(tmp_path / "step-00000006" / "engine" / "shard.pt", 9)
    assert checkpoints.newest() is not None
    assert steps(checkpoints) == [3]
    save(checkpoints, 9)
    assert steps(checkpoints) == [3, 9]
    assert not (tmp_path / "step-00000006").exists()


def test_one_without_digests_still_loads_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "step-00000003"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "shard.pt").write_text("weights 3")
    old = {"term": 1, "step": 3, "ranks": 1, "state": {}, "files": {"engine/shard.pt": 9}}
    (folder / "state.json").write_text(json.dumps(old))
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    assert found.version.step == 3
    assert "has no digests, as an older version of Tandem wrote it" in caplog.text


def test_a_step_past_the_journals_end_is_not_gone_on_from(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    save(checkpoints, 6)
    found = checkpoints.newest(last_step=5)
    assert found is not None
    assert found.version.step == 3
