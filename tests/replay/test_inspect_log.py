"""Logs for Inspect's viewer, as the files that they are; a test by hand has Inspect itself read them."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.replay.inspecting.log import LogHead, LogSample, write_log

HEAD = LogHead(task="math", model="m", created=1.7e9, metadata={"template": "own"})


def sample(name: str = "math/1", **changes: Any) -> LogSample:
    given: dict[str, Any] = {
        "id": name,
        "input": "1+1=?",
        "target": "2",
        "messages": [
            {"role": "user", "content": "1+1=?"},
            {"role": "assistant", "content": "2"},
        ],
        "stop_reason": "stop",
        "is_right": True,
        "answer": "2",
        "tokens": 3,
    }
    return LogSample(**{**given, **changes})


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Header, summaries, and each sample by the name of its file."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} isn't JSON")

    with zipfile.ZipFile(path) as log:
        assert all(one.compress_type == zipfile.ZIP_DEFLATED for one in log.infolist())
        files = {name: json.loads(log.read(name), parse_constant=refuse) for name in log.namelist()}
    samples = {
        name.removeprefix("samples/"): content
        for name, content in files.items()
        if name.startswith("samples/")
    }
    assert len(samples) + 2 == len(files)
    return files["header.json"], files["summaries.json"], samples


def test_samples_of_a_problem_are_its_epochs_and_scores_are_averaged(tmp_path: Path) -> None:
    written = [sample(), sample(is_right=False, answer=None), sample("math/2", is_right=None)]
    assert write_log(tmp_path / "made" / "x.eval", HEAD, iter(written)) == 3
    header, summaries, samples = read(tmp_path / "made" / "x.eval")
    assert list(samples) == [
        "math:1_epoch_1.json",
        "math:1_epoch_2.json",
        "math:2_epoch_1.json",
    ]
    keys = [("math:1", 1), ("math:1", 2), ("math:2", 1)]
    assert [(one["id"], one["epoch"]) for one in summaries] == keys
    assert [(one["id"], one["epoch"]) for one in samples.values()] == keys
    values = [one["scores"]["answer"]["value"] for one in samples.values()]
    assert values == ["C", "I", "N"]
    assert header["version"] == 2
    about = header["eval"]
    assert (about["task"], about["model"], about["config"]) == ("math", "m", {"epochs": 2})
    assert about["dataset"] == {"name": "math", "samples": 2, "sample_ids": ["math:1", "math:2"]}
    assert about["created"] == "2023-11-14T22:13:20+00:00"
    assert about["metadata"] == {"template": "own"}
    (score,) = header["results"]["scores"]
    assert score["metrics"]["accuracy"]["value"] == pytest.approx(1 / 3)
    assert header["results"]["completed_samples"] == 3
    assert header["stats"]["model_usage"]["m"]["output_tokens"] == 9


def test_numbers_that_json_has_not_are_left_out_of_scores_and_means(tmp_path: Path) -> None:
    numbers = [{"reward": 1.0, "form": math.nan}, {"reward": None, "form": 0.5, "x": math.inf}]
    written = [sample(numbers=one, metadata={"p": math.nan}) for one in numbers]
    write_log(tmp_path / "x.eval", HEAD, written)
    header, _, samples = read(tmp_path / "x.eval")
    assert [set(one["scores"]) for one in samples.values()] == [
        {"answer", "reward"},
        {"answer", "form"},
    ]
    means = {one["name"]: one["metrics"] for one in header["results"]["scores"]}
    assert means["reward"]["mean"]["value"] == 1.0
    assert means["form"]["mean"]["value"] == 0.5
    assert "x" not in means


def test_ids_become_names_of_files_and_stay_apart(tmp_path: Path) -> None:
    names = ["../../etc/x", "a/b", "a:b", "a\\b", "", "...", "line\nbreak", "x" * 500, "x" * 501]
    write_log(tmp_path / "x.eval", HEAD, [sample(name) for name in names for _ in range(2)])
    _, summaries, samples = read(tmp_path / "x.eval")
    assert len(samples) == 2 * len(names)
    found = list(dict.fromkeys(one["id"] for one in summaries))
    assert len(found) == len(names)
    for name, content in samples.items():
        assert name == f"{content['id']}_epoch_{content['epoch']}.json"
        assert "/" not in name
        assert "\\" not in name
        assert not name.startswith(".")
        assert "\n" not in name
        assert len(name) < 200


def test_a_log_that_can_not_be_written_whole_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x.eval"
    write_log(path, HEAD, [sample()])
    before = path.read_bytes()

    def fails() -> Iterator[LogSample]:
        yield sample()
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        write_log(path, HEAD, fails())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_is_no_unicode_is_written_all_the_same(tmp_path: Path) -> None:
    broken = "a\ud800b"
    write_log(
        tmp_path / "x.eval", HEAD, [sample(messages=[{"role": "assistant", "content": broken}])]
    )
    _, _, samples = read(tmp_path / "x.eval")
    (one,) = samples.values()
    assert one["output"]["choices"][0]["message"]["content"] == "a?b"


def test_equal_samples_make_equal_files(tmp_path: Path) -> None:
    for name in ("x.eval", "y.eval"):
        write_log(tmp_path / name, HEAD, [sample(str(number)) for number in range(5)])
    assert (tmp_path / "x.eval").read_bytes() == (tmp_path / "y.eval").read_bytes()
