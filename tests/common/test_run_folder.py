"""The run's folder: its paths, who may read what, and files that are whole or not there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tandem.common.errors import DataError
from tandem.common.run_folder import JoinInfo, RunFolder, read_join, wall_seconds, write_atomic

INFO = JoinInfo(run_id="abc", host="127.0.0.1", port=7000, password="hunter2")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_join_file_is_read_back_and_is_its_owners_alone(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write_join(INFO)
    assert read_join(folder.join) == INFO
    assert mode(folder.join) == 0o600


def test_a_join_file_that_lay_open_is_closed_when_it_is_written_again(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.join.write_text("{}")
    folder.join.chmod(0o644)
    folder.write_join(INFO)
    assert mode(folder.join) == 0o600


def test_the_password_is_not_shown():
    assert "hunter2" not in repr(INFO)
    assert "hunter2" not in f"{INFO}"


def test_a_missing_join_file_says_what_writes_it(tmp_path: Path):
    with pytest.raises(DataError, match="tandem start"):
        read_join(tmp_path / "join.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run_id": "x", "nonsense": 1}'])
def test_what_is_no_join_file_is_told(tmp_path: Path, text: str):
    path = tmp_path / "join.json"
    path.write_text(text)
    with pytest.raises(DataError, match="isn't a join file"):
        read_join(path)


def test_the_folder_is_made_with_its_parts_for_its_owner(tmp_path: Path):
    folder = RunFolder(tmp_path / "runs" / "x")
    folder.make()
    folder.make()
    for path in (folder.path, folder.logs, folder.redis, folder.checkpoints, folder.data):
        assert path.is_dir()
        assert mode(path) == 0o700


def test_run_json_is_empty_until_it_is_written(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.read_run() == {}
    folder.write_run({"run_id": "x", "state": "running"})
    assert folder.read_run() == {"run_id": "x", "state": "running"}


def test_a_damaged_run_json_is_told(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.run_json.write_text("{")
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        folder.read_run()


def test_an_atomic_write_leaves_one_file(tmp_path: Path):
    write_atomic(tmp_path / "x", "one")
    write_atomic(tmp_path / "x", "two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "two")]


def test_paths_of_the_config_may_name_the_run(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.resolve("{run}/data/x.parquet") == tmp_path / "data" / "x.parquet"
    assert folder.resolve("data/x.parquet") == Path("data/x.parquet")
    assert folder.resolve("~/x") == Path.home() / "x"


def test_the_time_of_a_supervisor_that_was_killed_counts_to_its_last_sign_of_life():
    life = {"wall_seconds": 30.0, "began": 1000.0, "alive": 1012.5}
    for state, seconds in (("stopped", 30.0), ("finished", 30.0), ("running", 42.5)):
        assert wall_seconds({**life, "state": state}) == seconds
    assert wall_seconds({**life, "state": "failed", "alive": 900.0}) == 30.0
    # As an older version wrote it, and nothing at all.
    assert wall_seconds({"state": "running", "wall_seconds": 7, "began": 1000.0}) == 7.0
    assert wall_seconds({}) == 0.0


def test_the_password_that_a_killed_writer_left_beside_the_join_file_is_removed(
    tmp_path: Path,
) -> None:
    left = tmp_path / ".join.json.4711"
    left.write_text("password")
    RunFolder(tmp_path).write_join(INFO)
    assert [path.name for path in tmp_path.iterdir()] == ["join.json"]
