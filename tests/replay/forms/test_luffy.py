"""LUFFY's columns: what they mean, and one clear error for each way to get them wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from form_rows import write_lines

from tandem.common.errors import DataError
from tandem.replay.forms import Content, Message
from tandem.replay.forms import read_rows as numbered_rows

Write = Callable[..., Path]


def read_rows(path: Path) -> list[Content]:
    """What the rows say; the first bad one raises."""
    return [row.content for row in numbered_rows(path)]


def a_row(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "data_source": "openr1",
        "prompt": [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": "1+1=?"},
        ],
        "target": [{"role": "assistant", "content": "<think>\n2"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 4},
    }
    row.update(changes)
    return {name: value for name, value in row.items() if value is not ...}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(*rows: dict[str, Any], name: str = "data.parquet", schema: Any = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
        return path

    return make


def test_a_row_is_read_as_it_stands(write: Write):
    (row,) = read_rows(write(a_row()))
    assert row.prompt == (
        Message(role="system", content="Think."),
        Message(role="user", content="1+1=?"),
    )
    assert (row.target, row.gold, row.ability) == ("<think>\n2", "2", "math")
    assert (row.data_source, row.extra) == ("openr1", {"split": "train", "index": 4})
    assert row.target_logprobs is None


def test_the_miniature_is_read(tmp_path: Path):
    from tandem.launch.miniature import parquet

    parquet.write(tmp_path, "hard", fresh=3, held_out=2)
    expert = read_rows(tmp_path / "expert.parquet")
    assert all(row.target and row.prompt[0].content.endswith("<think>") for row in expert)
    assert [row.target for row in read_rows(tmp_path / "fresh.parquet")] == [None] * 3


def test_a_target_may_be_null_or_absent_or_an_empty_list(write: Write):
    assert [r.target for r in read_rows(write(a_row(), a_row(target=None)))][1] is None
    assert read_rows(write(a_row(target=...)))[0].target is None
    assert read_rows(write(a_row(), a_row(target=[])))[1].target is None


def test_nan_and_an_empty_target_are_no_values(tmp_path: Path):
    nan = float("nan")
    missing = a_row(target=nan, extra_info=nan, ability=nan)
    without = a_row(target_probs=nan, extra_info={"index": 4, "split": nan})
    path = write_lines(tmp_path / "a.jsonl", [missing, without, a_row(target="")])
    rows = read_rows(path)
    assert [row.target for row in rows] == [None, "<think>\n2", None]
    assert [row.target_logprobs for row in rows] == [None] * 3
    assert [row.extra for row in rows[:2]] == [{}, {"index": 4}]


def test_ability_and_extra_info_may_be_absent(write: Write):
    (row,) = read_rows(write(a_row(ability=..., extra_info=...)))
    assert (row.ability, row.extra) == ("math", {})


def test_a_number_is_a_gold_answer(write: Write):
    (row,) = read_rows(write(a_row(reward_model={"style": "rule", "ground_truth": 42})))
    assert row.gold == "42"


def test_a_folder_is_read_file_by_file_with_rows_counted_on(write: Write):
    path = write(a_row(), a_row(), name="set/a.parquet")
    write(a_row(data_source="last"), name="set/b.parquet")
    rows = list(numbered_rows(path.parent))
    assert [row.number for row in rows] == [0, 1, 2]
    assert rows[2].content.data_source == "last"


def test_teacher_probabilities_become_log_probs(write: Write):
    (row,) = read_rows(write(a_row(target_probs=[0.5, 1.0])))
    assert row.target_logprobs is not None
    assert row.target_logprobs.dtype == np.float32
    assert np.allclose(row.target_logprobs, [np.log(0.5), 0.0])


def test_probabilities_under_the_published_name_are_found(write: Write):
    (row,) = read_rows(write(a_row(target_ds_qwen_7b_probs=[0.25])))
    assert row.target_logprobs is not None


def test_every_column_is_read_but_probabilities_that_do_not_count(write: Write):
    row = a_row(target_probs=[0.5], target_ds_qwen_7b_probs=[0.25], difficulty="hard")
    (found,) = numbered_rows(write(row))
    assert found.raw == {name: row[name] for name in row if name != "target_ds_qwen_7b_probs"}


def test_probabilities_of_a_row_without_a_target_are_left_out(write: Write):
    rows = read_rows(write(a_row(target_probs=[0.5]), a_row(target=None, target_probs=[0.5])))
    assert rows[1].target_logprobs is None


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_a_missing_column_is_named_with_those_that_are_there(write: Write, column: str):
    path = write(a_row(**{column: ...}))
    with pytest.raises(DataError, match=f"{path} .*it has .*ability.*luffy, which lacks {column}"):
        read_rows(path)


def test_an_empty_data_set_is_refused(write: Write):
    table = pa.Table.from_pylist([a_row()])
    path = write(schema=table.schema)
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(path)


def test_a_damaged_file_is_told(write: Write):
    path = write(*[a_row() for _ in range(500)])
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=str(path)):
        read_rows(path)


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"reward_model": {"style": "rule", "ground_truth": None}}, "reward_model.ground_truth: None"),
    ({"reward_model": {"style": "rule", "ground_truth": " "}}, "reward_model.ground_truth: ' '"),
    ({"reward_model": None}, "reward_model.ground_truth: None"),
    ({"prompt": []}, "column prompt"),
    ({"prompt": None}, "column prompt: None"),
    ({"prompt": [{"role": "robot", "content": "x"}]}, "column prompt: 'robot' isn't a role"),
    ({"prompt": [{"role": "user", "content": None}]}, "column prompt: None"),
    ({"prompt": [{"role": "assistant", "content": "x"}]}, "a prompt ends with what is asked"),
    ({"target": [{"role": "assistant", "content": "x"}] * 2}, "column target: .* has 2 messages"),
    ({"target": [{"role": "user", "content": "x"}]}, "column target: 'user'"),
    ({"data_source": ""}, "column data_source: ''"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ROWS, ids=[m for _, m in BAD_ROWS])
def test_a_bad_row_is_named_with_file_row_column_and_value(
    write: Write, changes: dict[str, Any], message: str
):
    path = write(a_row(), a_row(**changes))
    with pytest.raises(DataError, match=f"{path} row 1, .*{message}"):
        read_rows(path)


def test_a_prompt_may_be_plain_text(write: Write):
    (row,) = read_rows(write(a_row(prompt="1+1=?")))
    assert row.prompt == (Message(role="user", content="1+1=?"),)


def test_messages_without_a_role_are_refused(write: Write):
    with pytest.raises(DataError, match="isn't a message"):
        read_rows(write(a_row(prompt=[{"content": "x"}])))


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, float("nan")])
def test_what_is_no_probability_is_refused(write: Write, value: float):
    with pytest.raises(DataError, match=r"column target_probs: .*isn't a probability"):
        read_rows(write(a_row(target_probs=[0.5, value])))


def test_a_long_value_is_shown_cut(write: Write):
    with pytest.raises(DataError) as error:
        read_rows(write(a_row(reward_model="x" * 10_000, extra_info=None)))
    assert len(str(error.value)) < 400
