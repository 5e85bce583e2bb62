"""A run whose groups are kept, and runs that train on them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import Run, tandem

from tandem.common.errors import ConfigError, DataError
from tandem.launch.cli import dispatch

QUIET = ("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false")
AGAIN = ("offline", "miniature", "learner.source=offline", *QUIET)
# A reference's log-probs, too, are the same bits; and the rate of a step is that of a longer run. Offline the learner
# would have another number of threads, with which some processors add in another order.
SAME = (
    *("learner.objective.kl_coefficient=0.1", "learner.optimizer.schedule=constant"),
    "learner.threads=1",
)


def figures(folder: Path) -> list[dict[str, Any]]:
    """What each step says of loss, gradient and samples."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    wanted = ("train/", "ratio/", "reward/", "rollout/length", "replay/staleness")
    return [
        {name: value for name, value in record.items() if name.startswith(wanted)}
        for record in records
        if "train/loss" in record
    ]


@pytest.mark.timeout(300)
def test_an_archive_trains_the_same_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("start", "miniature", "log.archive=true", "run.dir=first", "run.steps=4")
    first = Run(tmp_path, *words, *SAME, *QUIET)
    assert first.wait() == 0, first.said()
    joined = Run(tmp_path, "archive", "first", "--out", "joined")
    assert joined.wait() == 0, joined.said()
    assert "32 groups of 4 steps" in joined.said()
    # Twice as many steps go through it twice.
    words = ("data.archive=joined", "run.dir=again", "run.steps=8", *SAME)
    words += ("learner.checkpoint_every=4", "learner.checkpoints_kept=1000")
    again = Run(tmp_path, *AGAIN, *words)
    assert again.wait() == 0, again.said()
    found = figures(tmp_path / "again")
    assert found[:4] == figures(tmp_path / "first")
    code, _, error = tandem(tmp_path, "export", "again", "--step", "4", "--out", "exported")
    assert code == 0, error
    ours, theirs = tmp_path / "exported", tmp_path / "first" / "model"
    name = "model.safetensors"
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    # Tokens keep their lag.
    for name in ("rollout/length_mean", "replay/staleness_mean", "reward/mean"):
        assert [record[name] for record in found[:4]] == [record[name] for record in found[4:]]

    # What another model or smaller limits can't take is refused.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r": raise rollout\.max_new_tokens=20 to at least "):
        dispatch([*AGAIN, "data.archive=joined", "run.dir=short", "rollout.max_new_tokens=20"])


def test_an_archive_is_trained_on_offline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"set learner\.source=offline"):
        dispatch(["start", "miniature", "data.archive=x", "--dry-run"])
    with pytest.raises(
        DataError, match=r"^x has no archive: `tandem archive RUN --out DIR` writes"
    ):
        dispatch([*AGAIN, "data.archive=x"])
    assert list(tmp_path.iterdir()) == []
