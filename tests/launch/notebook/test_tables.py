"""Records as Arrow tables."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tandem.common.errors import DataError
from tandem.common.run_folder import RunFolder
from tandem.launch.notebook import tables

STEP = {"step": 1, "term": 1, "time": 5.0}


def test_columns_are_of_all_rows_and_null_where_a_row_lacks_one() -> None:
    made = tables.table([{"a": 1, "b": "x"}, {"a": 2.5, "c": True}, {"d": [1], "e": None}])
    assert made.column("a").to_pylist() == [1.0, 2.5, None]
    assert made.column("b").to_pylist() == ["x", None, None]
    assert made.column("c").to_pylist() == [None, True, None]
    assert made.column("d").to_pylist() == [None, None, "[1]"]
    assert made.column("e").null_count == 3


def test_a_column_of_several_kinds_is_json() -> None:
    assert tables.table([{"a": 1}, {"a": "x"}]).column("a").to_pylist() == ["1", '"x"']


def test_metrics_are_the_steps_without_evaluations_and_a_repeated_step_counts_once() -> None:
    records = [
        {**STEP, "train/loss": 3.0},
        {**STEP, "eval/id": "heldout@0", "eval/heldout/accuracy": 0.5},
        {**STEP, "term": 2, "train/loss": 2.0},
    ]
    made = tables.metrics(records)
    assert made.schema.field("step").type == pa.int64()
    assert made.to_pylist() == [{**STEP, "term": 2, "train/loss": 2.0}]


def test_held_out_pairs_belong_to_their_step() -> None:
    pairs = {"heldout/preference_pairs": 7.0}
    made = tables.metrics([{**STEP, "train/loss": 3.0}, {**STEP, **pairs}])
    assert made.to_pylist() == [{**STEP, "train/loss": 3.0, **pairs}]


def test_evaluations_of_several_sets_share_their_columns() -> None:
    records = [
        {**STEP, "eval/id": "a@1", "eval/due": 1, "eval/version": "1.1", "eval/a/accuracy": 0.25},
        {**STEP, "eval/id": "b@1", "eval/due": 1, "eval/version": "1.1", "eval/b/accuracy": 0.75},
        {**STEP, "train/loss": 3.0},
    ]
    made = tables.evaluations(records)
    assert made.column("set").to_pylist() == ["a", "b"]
    assert made.column("accuracy").to_pylist() == [0.25, 0.75]
    assert made.column("version").to_pylist() == ["1.1", "1.1"]


def test_samples_have_a_row_each_with_their_components() -> None:
    group = {"step": 1, "group_id": "0-0", "problem_id": "p/0", "prompt": "1+1=", "gold": "2"}
    rows = [
        {"source": "own", "text": "2", "reward": 1.0, "components": {"accuracy": 1.0}},
        {"source": "expert", "text": "two", "reward": None},
    ]
    made = tables.samples([{**group, "rows": rows}])
    assert made.column("prompt").to_pylist() == ["1+1=", "1+1="]
    assert made.column("place").to_pylist() == [0.0, 1.0]
    assert made.column("component/accuracy").to_pylist() == [1.0, None]


def test_a_run_without_an_archive_says_how_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log\.archive=true"):
        tables.groups(RunFolder(tmp_path), None)
    assert tables.metrics([]).num_rows == 0
