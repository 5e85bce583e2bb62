"""The data files: their columns, their rows, and that writing them is safe to repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.common.errors import DataError
from tandem.launch.miniature import parquet


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def prompts(path: Path) -> set[str]:
    return {row["prompt"][0]["content"] for row in rows(path)}


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hard")
    parquet.write(folder, "hard")
    return folder


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("easy")
    parquet.write(folder, "easy")
    return folder


def test_the_hard_setting_has_four_traces_fresh_problems_and_500_held_out(hard: Path):
    assert {path.name for path in hard.iterdir()} == {
        "expert.parquet",
        "fresh.parquet",
        "heldout.parquet",
        "manifest.json",
    }
    assert len(rows(hard / "expert.parquet")) == 4
    assert len(rows(hard / "fresh.parquet")) >= 1000
    assert len(rows(hard / "heldout.parquet")) == 500


def test_an_expert_row_has_the_published_columns(hard: Path):
    row = rows(hard / "expert.parquet")[0]
    [question] = row["prompt"]
    [answer] = row["target"]
    assert question["role"] == "user"
    assert question["content"].endswith("=?<think>")
    assert answer["role"] == "assistant"
    gold = row["reward_model"]["ground_truth"]
    assert answer["content"].endswith(f"={gold}</think> <answer> \\boxed{{{gold}}} </answer>")
    assert row == {
        "data_source": "miniature",
        "prompt": [question],
        "target": [answer],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": "expert", "index": 0},
    }


def test_only_expert_rows_have_a_target(hard: Path, easy: Path):
    assert all(row["target"] for row in rows(hard / "expert.parquet"))
    for path in (hard / "fresh.parquet", hard / "heldout.parquet", easy / "train.parquet"):
        assert all(row["target"] is None for row in rows(path))
        # A column of nulls must still be of the messages' type.
        assert (
            pq.read_schema(path).field("target").type
            == pq.read_schema(hard / "expert.parquet").field("target").type
        )


def test_each_setting_has_problems_of_its_k_only(hard: Path, easy: Path):
    for folder, k in ((hard, 8), (easy, 4)):
        for path in folder.glob("*.parquet"):
            assert {sum(p.count(sign) for sign in "+-") for p in prompts(path)} == {k}


def test_no_problem_is_in_two_files_or_twice_in_one(hard: Path, easy: Path):
    for folder in (hard, easy):
        files = list(folder.glob("*.parquet"))
        total = sum(len(rows(path)) for path in files)
        assert len(set().union(*(prompts(path) for path in files))) == total


def test_training_problems_are_drawn_around_the_held_out_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # k=1 has so few problems that ignoring the held-out ones would certainly repeat some.
    monkeypatch.setitem(parquet.OPERATIONS, "easy", 1)
    parquet.write(tmp_path, "easy", train=300, held_out=150, traces=0)
    assert not prompts(tmp_path / "train.parquet") & prompts(tmp_path / "heldout.parquet")


def test_held_out_problems_are_the_same_for_every_seed_and_training_ones_are_not(
    hard: Path, tmp_path: Path
):
    parquet.write(tmp_path, "hard", seed=1)
    assert rows(tmp_path / "heldout.parquet") == rows(hard / "heldout.parquet")
    assert not prompts(tmp_path / "fresh.parquet") & prompts(hard / "fresh.parquet")


def test_numbers_of_traces_and_fresh_problems_are_parameters(tmp_path: Path):
    manifest = parquet.write(tmp_path, "hard", traces=16, fresh=32, held_out=8)
    assert manifest.rows == {"expert.parquet": 16, "fresh.parquet": 32, "heldout.parquet": 8}
    assert json.loads((tmp_path / "manifest.json").read_text()) == {
        "setting": "hard",
        "k": 8,
        "seed": 0,
        "rows": manifest.rows,
        "traces": 16,
    }


def test_writing_the_same_data_again_changes_nothing(tmp_path: Path):
    first = parquet.write(tmp_path, "easy", train=8, held_out=8)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert parquet.write(tmp_path, "easy", train=8, held_out=8) == first
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_an_interrupted_write_is_completed(tmp_path: Path):
    parquet.write(tmp_path, "easy", train=8, held_out=8)
    (tmp_path / "heldout.parquet").unlink()
    (tmp_path / "manifest.json").unlink()
    parquet.write(tmp_path, "easy", train=8, held_out=8)
    assert len(rows(tmp_path / "heldout.parquet")) == 8
    assert (tmp_path / "manifest.json").exists()


def test_other_data_of_the_same_name_is_refused_and_kept(tmp_path: Path):
    theirs = pa.table({"question": ["mine"]})
    pq.write_table(theirs, tmp_path / "heldout.parquet")
    with pytest.raises(DataError, match=r"heldout\.parquet holds other data"):
        parquet.write(tmp_path, "easy", train=8)
    assert pq.read_table(tmp_path / "heldout.parquet") == theirs
    assert [path.name for path in tmp_path.iterdir()] == ["heldout.parquet"]


def test_an_unknown_setting_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="'medium' is not one of hard, easy"):
        parquet.write(tmp_path, "medium")  # type: ignore[arg-type]
