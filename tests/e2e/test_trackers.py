"""An offline run with both trackers on, one of which can't work: it ends well, and the other has it all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Run, steps, summary, tandem

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Path]]:
    here = tmp_path_factory.mktemp("tracked")
    folder = here / "runs" / "miniature-sft"
    folder.mkdir(parents=True)
    # Where TensorBoard wants a folder is a file.
    (folder / "tensorboard").touch()
    words = ("run.steps=4", "data.evaluate.0.limit=20", "evaluate.at_start=false")
    run = Run(here, "offline", *words, "log.wandb=online", "log.tensorboard=true")
    try:
        assert run.wait() == 0, run.said()
        yield run, folder
    finally:
        run.end()


def test_offline_needs_no_rollout_worker(tracked: tuple[Run, Path]) -> None:
    _, folder = tracked
    made = summary(folder)
    assert made["accuracy_after"] is not None
    assert not list((folder / "logs").glob("rollout-*.log"))


def test_a_tracker_that_fails_is_told_once_and_stops_nothing(tracked: tuple[Run, Path]) -> None:
    run, folder = tracked
    assert steps(folder) == [1, 2, 3, 4]
    told = [line for line in run.said().splitlines() if line.startswith("warning: ")]
    assert len(told) == 1
    assert told[0].startswith("warning: tensorboard ended with exit code 1, the run goes on")
    assert summary(folder)["restarts"] == []


def test_the_other_has_every_record_of_a_step(tracked: tuple[Run, Path]) -> None:
    run, folder = tracked
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sent = json.loads((folder / "trackers" / "wandb.json").read_text())
    # The evaluation is made when the run's processes have ended.
    assert [one["step"] for one in records if "eval/id" in one] == [4]
    assert "eval/id" in records[-1]
    assert (sent["rows"], sent["step"]) == (len(records) - 1, 4)
    assert f"track {folder.relative_to(folder.parents[1])} --to wandb` sends" in run.said()
    (made,) = (folder / "wandb").glob("offline-run-*")
    # The tests have neither a key nor a network.
    command = f"wandb sync {made.relative_to(folder.parents[1])}"
    assert (
        f"W&B was offline (runs/miniature-sft/logs/wandb.log says why): `{command}`" in run.said()
    )


def test_what_is_missing_is_sent_afterwards(tracked: tuple[Run, Path]) -> None:
    _, folder = tracked
    (folder / "tensorboard").unlink()
    count = len((folder / "metrics.jsonl").read_text().splitlines())
    code, out, err = tandem(folder.parent, "track", str(folder), "--to", "tensorboard")
    assert code == 0, err
    assert out.startswith(f"{count} records sent ({count} in all)")
    assert list((folder / "tensorboard").glob("events.out.*"))
