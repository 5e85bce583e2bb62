"""What an environment is given of a row, and rows and models that can't be played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.common.config import EvalSetConfig, build
from tandem.common.errors import ConfigError
from tandem.common.models import load_tokenizer
from tandem.common.records import ENVIRONMENT
from tandem.launch.ingest.counts import SourceCounts
from tandem.launch.ingest.rows import SourceReader
from tandem.reward.grading import Grader

TREE = {
    "run": {"steps": 1},
    "model": {"path": "miniature-tools"},
    "data": {"train": [{"path": "rows.jsonl"}]},
    "reward": {"components": [{"name": "environment"}]},
    "environments": {
        "use": {
            "one": {"form": "text", "target": "a.b:C"},
            "other": {"form": "tools", "target": "a.b:D"},
        },
        "default": "one",
    },
}


def read(
    folder: Path,
    rows: list[dict[str, Any]],
    *overrides: str,
    tokenizer: Any = None,
    parquet: bool = False,
) -> tuple[list[dict[str, Any]], SourceCounts]:
    """The tasks of some rows, and what was left out."""
    file = folder / "rows.jsonl"
    if parquet:
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    config = build(TREE, overrides)
    with Grader(config.reward) as grader:
        reader = SourceReader(
            config, tokenizer or load_tokenizer("miniature-tools"), grader, lambda text: None
        )
        problems, _, counts = reader.read(EvalSetConfig(path=str(file)), file)
    return [problem.extra[ENVIRONMENT] for problem in problems], counts


def test_a_row_names_its_environment_in_a_column_and_is_given_whole(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "1*2=?"}]
    rows = [
        {"prompt": asked, "level": 3, "environment": "other"},
        {"prompt": asked, "level": 4},
        {"prompt": asked, "environment": "third"},
    ]
    tasks, counts = read(tmp_path, rows)
    assert tasks == [
        {"name": "other", "row": {"prompt": asked, "level": 3}},
        {"name": "one", "row": {"prompt": asked, "level": 4}},
    ]
    ((task,), _) = read(tmp_path, [{"task": {"seed": 5}, "environment": "other"}])
    assert task == {"name": "other", "row": {"task": {"seed": 5}}}
    (why,) = counts.bad_rows.first.values()
    assert "'third' isn't one of environments.use" in why
    assert "1 environment isn't one of environments.use" in str(counts)


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "1*2=?", "answer": "2"},
        {"prompt": "1*2=?", "gold": "2"},
        {"question": "1*2=?", "answer": "It is 2.\n#### 2"},
        {
            "messages": [
                {"role": "user", "content": "1*2=?"},
                {"role": "assistant", "content": "It is 2."},
            ]
        },
    ],
    ids=["problem", "prompt", "question", "messages"],
)
def test_the_prompt_of_any_form_is_given_as_messages_without_its_answer(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    ((task,), _) = read(tmp_path, [row])
    assert task["row"]["prompt"] == [{"role": "user", "content": "1*2=?"}]


def test_a_row_in_verls_columns_names_its_environment_in_parquet_as_in_json(tmp_path: Path) -> None:
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1*2=?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "level": 3,
    }
    for parquet in (False, True):
        tasks, _ = read(tmp_path, [{**row, "environment": "other"}], parquet=parquet)
        assert tasks == [{"name": "other", "row": row}]


def test_system_prompts_of_the_config_are_in_the_prompt_that_is_given(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1*2=?"}]
    rows = [{"prompt": own, "level": 1}, {"prompt": own[1:], "level": 2}]
    tasks, _ = read(tmp_path, rows, "data.system_prompt=Take your time.")
    system = {"role": "system", "content": "Take your time."}
    assert [task["row"]["prompt"] for task in tasks] == [own, [system, own[1]]]
    tasks, _ = read(tmp_path, rows, "data.remove_system=true")
    assert [task["row"]["prompt"] for task in tasks] == [own[1:], own[1:]]


def test_a_model_without_a_chat_template_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    bare = load_tokenizer("miniature")
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        read(tmp_path, [{"task": {"seed": 1}}], tokenizer=bare)
    agents = "environments.use={own: {form: agent, target: 'a.b:c'}}"
    read(tmp_path, [{"task": {"seed": 1}}], agents, "environments.default=own", tokenizer=bare)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{{ m.content if m.role != 'tool' }}", "leaves out a tool's result"),
        (
            "{{ raise_exception('roles must alternate') if m.role == 'tool' }}",
            r"refuses a tool's result \(.*roles must alternate",
        ),
    ],
)
def test_a_model_whose_template_has_no_place_for_tools_plays_no_environment_with_tools(
    tmp_path: Path, written: str, words: str
) -> None:
    bare = load_tokenizer("miniature-tools")
    bare.chat_template = f"{{% for m in messages %}}{written}<|im_end|>{{% endfor %}}"
    with pytest.raises(ConfigError, match=rf"chat template that {words}.*set form=text"):
        read(tmp_path, [{"task": {"seed": 1}}], tokenizer=bare)
    text = "environments.use={own: {form: text, target: 'a.b:C'}}"
    read(tmp_path, [{"task": {"seed": 1}}], text, "environments.default=own", tokenizer=bare)
