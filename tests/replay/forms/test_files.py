"""Files are recognised by their bytes, and a row that can't be read doesn't end them."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from form_rows import ROWS, write_array, write_lines

from tandem.common.errors import DataError
from tandem.replay.forms import LeftOut, data_files, read_rows
from tandem.replay.forms import files as files_module

GOOD = [ROWS["question_answer"](n) for n in range(1, 4)]


def reasons(path: Path) -> tuple[int, list[str]]:
    left_out = LeftOut()
    kept = list(read_rows(path, left_out=left_out))
    return len(kept), sorted(left_out.counts)


def test_the_name_of_a_file_says_nothing(tmp_path: Path):
    assert reasons(write_lines(tmp_path / "a.parquet", GOOD)) == (3, [])
    assert reasons(write_array(tmp_path / "a.jsonl", GOOD)) == (3, [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "2+2?", "answer": "4"', "isn't JSON"),
        ("[1, 2]", "isn't an object"),
        ("7", "isn't an object"),
        ('{"question": "caf\udce9", "answer": "4"}', "isn't UTF-8"),
        ('{"question": "\\ud83d", "answer": "4"}', "half a character"),
        ('{"question": ' + "[" * 100_000 + "}", "isn't JSON"),
        ('{"question": "2+2?", "answer": ' + "9" * 5000 + "}", "isn't JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_left_out(line: str, reason: str, tmp_path: Path):
    kept, (found,) = reasons(write_lines(tmp_path / "a.jsonl", [GOOD[0], line, GOOD[1]]))
    assert kept == 2
    assert reason in found


@pytest.mark.parametrize("name", ["0.json", "0.json.gz"])
def test_a_file_may_hold_one_object_over_several_lines(name: str, tmp_path: Path):
    """As competition MATH has its problems."""
    text = "\ufeff\n" + json.dumps(GOOD[0], indent=4) + "\n"
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith("z") else text.encode()
    )
    assert reasons(tmp_path / name) == (1, [])
    # Its first line is no object in a file of lines either.
    write_lines(tmp_path / "a.jsonl", ['{"question": "2+2?",', *GOOD])
    kept, (found,) = reasons(tmp_path / "a.jsonl")
    assert kept == 3
    assert "isn't JSON" in found


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files_module, "MAX_ROW_CHARACTERS", 1000)
    monkeypatch.setattr(files_module, "PIECE_CHARACTERS", 64)
    long = json.dumps({"question": "x" * 5000, "answer": "4"})
    kept, (found,) = reasons(write_lines(tmp_path / "a.jsonl", [GOOD[0], long, GOOD[1]]))
    assert (kept, found) == (2, "row has more than 1,000 bytes")


def test_an_array_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files_module, "PIECE_CHARACTERS", 7)
    path = write_array(tmp_path / "a.json", GOOD)
    assert [row.content.gold for row in read_rows(path)] == ["2", "4", "6"]


def test_a_piece_of_an_array_is_not_copied_for_each_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lengths = set()

    class Watched(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            lengths.add(len(s))
            return super().raw_decode(s, idx)

    path = write_array(tmp_path / "a.json", GOOD * 100)
    monkeypatch.setattr(json, "JSONDecoder", Watched)
    assert len(list(read_rows(path))) == 300
    assert lengths == {path.stat().st_size}


def test_a_damaged_array_says_after_which_row(tmp_path: Path):
    path = write_array(tmp_path / "a.json", GOOD)
    path.write_text(path.read_text().rstrip("]\n")[:-3])
    with pytest.raises(DataError, match="damaged after row 2"):
        list(read_rows(path))


@pytest.mark.parametrize("more", ['[{"question": "7?"}]', '{"question": "7?"}', "]", "x"])
@pytest.mark.parametrize("space", [0, 200])
@pytest.mark.parametrize("ends", [True, False], ids=["piece-ends-with-array", "pieces"])
def test_what_follows_an_array_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, space: int, ends: bool
):
    path = write_array(tmp_path / "a.json", GOOD)
    array = path.read_text().rstrip()
    monkeypatch.setattr(files_module, "PIECE_CHARACTERS", len(array) if ends else 64)
    path.write_text(array + "\n" * space)
    assert len(list(read_rows(path))) == 3
    path.write_text(array + "\n" * space + more)
    with pytest.raises(DataError, match=r"a\.json has more after its array of 3 rows: .*: put all"):
        list(read_rows(path))


def test_parquet_with_a_text_that_is_not_utf_8_loses_that_row(tmp_path: Path):
    questions = pa.array([b"a", b"caf\xe9", b"c"], pa.binary())
    table = pa.table({"question": questions.view(pa.string()), "answer": ["1", "2", "3"]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert reasons(tmp_path / "a.parquet") == (2, ["row can't be read"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps({"question": "x"}), "neither parquet nor JSON"),
        (b"!!python/object/apply:os.system ['true']\n", "neither parquet nor JSON"),
        (b"question,answer\n1,2\n", "neither parquet nor JSON"),
        (b"PAR1 and no more", "can't be read as parquet"),
        (b"\x1f\x8b damaged", "can't be read"),
        (b"", "is empty"),
        (b"[]", "holds no rows"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str, tmp_path: Path):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / "a"))


@pytest.mark.parametrize("place", [2, 20, -6])
def test_a_damaged_gzip_file_is_named(place: int, tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl.gz", GOOD * 100)
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz can't be read: "):
        list(read_rows(path))


def test_a_folder_is_its_data_files_by_name(tmp_path: Path):
    for name in ("b.jsonl", "a.jsonl.gz", "c.json"):
        write_lines(tmp_path / name, GOOD)
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / ".hidden.jsonl").write_text("no data")
    assert [file.name for file in data_files(tmp_path)] == ["a.jsonl.gz", "b.jsonl", "c.json"]
    assert [row.number for row in read_rows(tmp_path)] == list(range(9))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="without data files"):
        data_files(tmp_path / "empty")
    with pytest.raises(DataError, match="is missing"):
        data_files(tmp_path / "none")


def test_so_are_the_files_in_its_folders_as_the_hub_has_them(tmp_path: Path):
    for name in (
        "main/train-0.jsonl",
        "main/train-1.jsonl",
        "easy/train.jsonl",
        ".cache/old.jsonl",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, GOOD)
    found = [str(file.relative_to(tmp_path)) for file in data_files(tmp_path)]
    assert found == ["easy/train.jsonl", "main/train-0.jsonl", "main/train-1.jsonl"]
    # The folder that is named may lie in a hidden one, such as a cache.
    assert len(data_files(tmp_path / ".cache")) == 1


def test_a_parquet_file_is_never_held_whole(tmp_path: Path):
    path, rows = tmp_path / "a.parquet", files_module.BATCH_ROWS

    def group() -> pa.Table:
        return pa.Table.from_pylist([{**GOOD[0], "note": random.randbytes(2048).hex()}] * rows)

    with pq.ParquetWriter(path, group().schema, compression="none", use_dictionary=False) as writer:
        for _ in range(32):
            writer.write_table(group())
    size = path.stat().st_size
    assert size > 32 << 20
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in files_module.raw_rows(path)]
    assert len(held) == 32 * rows
    assert max(held) < size / 4


def test_csv_is_read_by_its_name_under_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffid,prompts_final\n1,"two\nlines, one cell"\n', encoding="utf-8")
    assert list(files_module.raw_rows(path)) == [
        {"id": "1", "prompts_final": "two\nlines, one cell"}
    ]
    path.write_bytes(b"id\n\xff\n")
    with pytest.raises(DataError, match=r"can't be read as CSV after line 0: .* as UTF-8"):
        list(files_module.raw_rows(path))


def test_csv_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer,question\n1+1?,2,1+2?\n")
    with pytest.raises(DataError, match=r"a\.csv has two columns named 'question': give each"):
        list(files_module.raw_rows(path))
    # Spreadsheets write columns without a name behind the others.
    path.write_text("question,answer,,\n1+1?,2,,\n")
    assert list(files_module.raw_rows(path)) == [{"question": "1+1?", "answer": "2", "": None}]


def test_a_field_of_csv_may_be_long_and_one_that_is_too_long_is_told_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    long = "x" * 200_000
    path.write_text(f'prompt,response\nq,"two\nlines"\nq,{long}\n')
    assert [row.content.target for row in read_rows(path)] == ["two\nlines", long]
    monkeypatch.setattr(files_module, "MAX_ROW_CHARACTERS", 1000)
    with pytest.raises(DataError, match=r"a\.csv line 4 can't be read as CSV: field larger than"):
        list(read_rows(path))
    monkeypatch.undo()
    assert len(list(read_rows(path))) == 2  # The limit is the process's, and is set anew.


def test_a_row_of_csv_with_more_fields_than_the_header_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        'question,answer,ability\nWhat is 1,000+1?,1001,sum\n\n"What is 1,000+1?",1001\n'
    )
    left_out = LeftOut()
    (row,) = read_rows(path, left_out=left_out)
    # Some writers leave out empty cells at the end.
    assert (row.content.prompt[0].content, row.content.gold) == ("What is 1,000+1?", "1001")
    assert left_out.counts == {"row has more fields than the header": 1}
    with pytest.raises(DataError, match=r"a\.csv row 0, .*: put texts with commas into double"):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("text", "gold", "target"),
    [
        ("problem,solution,expected_answer,answer\nq,s,,5\n", "5", "s"),
        ("problem,solution,answer\nq,\\boxed{5},\n", "\\boxed{5}", "\\boxed{5}"),
        ("prompt,response,gold\nq,r,\n", "", "r"),
        ("question,answer,ability\nq,5, \n", "5", None),
    ],
)
def test_an_empty_cell_of_csv_is_no_value(
    text: str, gold: str, target: str | None, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text)
    (row,) = read_rows(tmp_path / "a.csv")
    assert (row.content.gold, row.content.target, row.content.extra) == (gold, target, {})


def test_a_column_of_csv_that_is_empty_in_all_rows_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\n2+2?,4,\n2+3?,5, \n2+4?,6\n")
    contents = [row.content for row in read_rows(path)]
    assert [(one.target, one.label) for one in contents] == [("4", None), ("5", None), ("6", None)]
    # Of a file with some labels, the rows without one aren't learned from as wanted ones.
    path.write_text("prompt,completion,label\n" + "2+2?,4,\n" * 100 + "2+2?,5,False\n")
    left_out = LeftOut()
    assert [row.content.label for row in read_rows(path, left_out=left_out)] == [False]
    assert left_out.counts == {"label isn't true or false": 100}
    # What is wrong further down is told where it stands.
    path.write_text('question,answer,note\n1+1?,2,\n"1+2?,3,\n')
    rows = files_module.raw_rows(path)
    assert next(rows) == {"question": "1+1?", "answer": "2", "note": None}
    with pytest.raises(DataError, match=r"a\.csv line 3 can't be read as CSV"):
        next(rows)


def hinted(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": f"{row['question']} {row['hint'] or ''}".strip(), "answer": row["answer"]}


def test_environments_and_own_forms_get_the_columns_of_csv_that_are_empty_in_all_rows(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer,hint\n1+1?,2,\n")
    whole = {"question": "1+1?", "answer": "2", "hint": None}
    (row,) = read_rows(path)
    assert (row.raw, row.content.extra) == (whole, {})
    (row,) = read_rows(path, f"{__name__}:hinted")
    assert (row.raw, row.content.prompt[0].content) == (whole, "1+1?")


def test_a_folder_is_all_data_files_in_it_csv_too(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv", "deep/c.parquet", "notes.txt", ".hidden.csv"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("id\n1\n")
    found = [str(file.relative_to(tmp_path)) for file in files_module.data_files(tmp_path)]
    assert found == ["a.csv", "b.jsonl", "deep/c.parquet"]
