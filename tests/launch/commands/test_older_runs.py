"""Commands that read a run go on where an older version began it with settings that are refused today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tandem.common.config import build, read_yaml
from tandem.common.errors import ConfigError
from tandem.common.run_folder import RunFolder
from tandem.launch.cli import dispatch
from tandem.launch.run.opened.presets import load


@pytest.fixture
def older(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    settings = [f"run.dir={folder.path}", "expert.per_group=0"]
    tree = load("miniature").resolve(settings).model_dump(mode="json")
    tree["rollout"]["group_size"] = 1
    folder.config.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"raise rollout\.group_size"):
        build(read_yaml(folder.config))
    folder.write_run({"run_id": "0123456789ab", "preset": "miniature", "state": "finished"})
    return folder


def test_its_metrics_are_sent(older: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"step": 1, "term": 1, "time": 1.0, "train/loss": 2.0}
    older.metrics.write_text(json.dumps(record) + "\n")
    assert dispatch(["track", str(older.path), "--to", "tensorboard"]) == 0
    assert "1 records sent" in capsys.readouterr().out


def test_its_held_out_sets_are_known(older: RunFolder) -> None:
    with pytest.raises(ConfigError, match="--set other: the run has heldout"):
        dispatch(["evaluate", "--run", str(older.path), "--set", "other"])
    words = ["evaluate", "--run", str(older.path), "--model", "miniature", "--set", "heldout"]
    with pytest.raises(ConfigError, match="--out comes 2 times, and 1 set is evaluated"):
        dispatch([*words, "--out", "a.json", "--out", "b.json"])


def test_its_model_is_served(older: RunFolder) -> None:
    older.model.mkdir()
    (older.model / "config.json").write_text('{"max_position_embeddings": 256}')
    with pytest.raises(ConfigError, match="has a context of 256 tokens"):
        dispatch(["serve", str(older.model), "--port", "0", "--context", "300"])
