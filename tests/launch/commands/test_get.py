"""``tandem get`` from a hub on loopback: whole, interrupted, damaged, and from names that aren't there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tandem.common import hub
from tandem.common.errors import DataError
from tandem.common.models import resolve
from tandem.common.run_folder import try_lock
from tandem.replay.forms import read_rows

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "replay")]

from form_rows import ROWS, write_lines, write_parquet  # noqa: E402
from standin_hub import StandinHub  # noqa: E402


@pytest.fixture
def standin() -> Iterator[StandinHub]:
    served = StandinHub()
    served.add("model", "org/tiny", Path(resolve("miniature")))
    yield served
    served.close()


@pytest.fixture
def environment(standin: StandinHub, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_ENDPOINT": standin.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "HF_HUB_ETAG_TIMEOUT": "5",
    }


def get(environment: dict[str, str], here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.launch.cli", "get", *words]
    return subprocess.run(
        command, env=environment, cwd=here, capture_output=True, text=True, timeout=100
    )


def test_a_model_is_a_folder_that_transformers_loads(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = get(environment, tmp_path, "model", "org/tiny")
    assert done.returncode == 0, done.stderr
    assert "use it as model.path=models/tiny" in done.stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "models" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model(**tokenizer("1+2", return_tensors="pt")).logits.shape[1] == 3


def test_a_killed_download_goes_on_where_it_was(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    megabyte = 1 << 20
    weights = np.random.default_rng(0).bytes(25 * megabyte)
    standin.repos["model", "org/big"] = {"config.json": b"{}", "model.safetensors": weights}
    standin.stall_after = 21 * megabyte
    command = [sys.executable, "-m", "tandem.launch.cli", "get", "model", "org/big"]
    child = subprocess.Popen(command, env=environment, cwd=tmp_path)
    assert standin.stalled.wait(60)
    part = tmp_path / "models" / "big"
    while sum(file.stat().st_size for file in part.rglob(".*.part")) < 10 * megabyte:
        assert child.poll() is None
    child.kill()
    child.wait(10)
    done = get(environment, tmp_path, "model", "org/big")
    assert done.returncode == 0, done.stderr
    assert (part / "model.safetensors").read_bytes() == weights
    ranges = [int(asked[6:].partition("-")[0]) for _, _, asked in standin.requests if asked]
    assert max(ranges) >= 10 * megabyte


def test_a_broken_connection_is_made_again(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    weights = np.random.default_rng(0).bytes(3 << 20)
    standin.repos["model", "org/big"] = {"config.json": b"{}", "model.safetensors": weights}
    standin.cut_after = 2 << 20
    done = get(environment, tmp_path, "model", "org/big")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models" / "big" / "model.safetensors").read_bytes() == weights
    assert [asked for _, _, asked in standin.requests if asked]


def test_a_flipped_byte_is_found(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    standin.flips["model.safetensors"] = 100_000
    done = get(environment, tmp_path, "model", "org/tiny")
    assert done.returncode != 0
    assert "model.safetensors of org/tiny arrived damaged" in done.stderr
    standin.flips = {"tokenizer_config.json": 3}
    (tmp_path / "models" / "tiny" / "tokenizer_config.json").unlink(missing_ok=True)
    done = get(environment, tmp_path, "model", "org/tiny")
    assert "tokenizer_config.json of org/tiny arrived damaged" in done.stderr
    assert not list(tmp_path.rglob(".*.part"))


def test_a_file_that_was_damaged_on_the_disk_is_fetched_again(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert get(environment, tmp_path, "model", "org/tiny").returncode == 0
    file = tmp_path / "models" / "tiny" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    assert get(environment, tmp_path, "model", "org/tiny").returncode == 0
    assert file.read_bytes() == whole


def test_pickles_are_not_fetched(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    standin.repos["model", "org/tiny"]["pytorch_model.bin"] = b"\x80\x04." * 10
    assert get(environment, tmp_path, "model", "org/tiny").returncode == 0
    assert not list(tmp_path.rglob("*.bin"))
    del standin.repos["model", "org/tiny"]["model.safetensors"]
    done = get(environment, tmp_path, "model", "org/tiny", "--to", "other")
    assert "has no safetensors" in done.stderr


def test_names_outside_of_the_folder_are_refused(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    standin.repos["model", "org/tiny"]["../../evil.json"] = b"{}"
    done = get(environment, tmp_path, "model", "org/tiny")
    assert done.returncode != 0
    assert "outside of its folder" in done.stderr
    assert not list(tmp_path.parent.glob("evil*"))


def test_the_split_of_a_data_set(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    for name in ("main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        write_parquet(source / name, [ROWS["gsm8k"](n) for n in range(1, 4)])
    write_lines(source / "main" / "test.jsonl", [ROWS["gsm8k"](9)])
    write_lines(source / "other-train.jsonl", [ROWS["gsm8k"](9)])
    (source / "README.md").write_text("about")
    standin.add("dataset", "org/set", source)
    done = get(environment, tmp_path, "data", "org/set/main:train")
    assert done.returncode == 0, done.stderr
    assert len(list(read_rows(tmp_path / "data" / "set-main-train"))) == 6
    # A folder is read with all that is in it.
    done = get(environment, tmp_path, "data", "org/set/main:test")
    assert done.returncode == 0, done.stderr
    assert len(list(read_rows(tmp_path / "data" / "set-main-test"))) == 1
    assert len(list(read_rows(tmp_path / "data" / "set-main-train"))) == 6
    done = get(environment, tmp_path, "data", "org/set:validation")
    assert "has no data files of that name (it has README.md, main/test.jsonl" in done.stderr


def test_a_split_is_fetched_without_those_whose_names_begin_as_its_own(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    (source / "data").mkdir(parents=True)
    for name, count in (("train", 2), ("train_1M", 5), ("train_2M", 7)):
        rows = [ROWS["gsm8k"](n) for n in range(1, 1 + count)]
        write_parquet(source / "data" / f"{name}-00000-of-00001.parquet", rows)
    standin.add("dataset", "org/set", source)
    for name, count in (("train", 2), ("train_1M", 5)):
        done = get(environment, tmp_path, "data", f"org/set:{name}")
        assert done.returncode == 0, done.stderr
        assert len(list(read_rows(tmp_path / "data" / f"set-{name}"))) == count


def test_a_name_on_the_hub_stands_for_a_file(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_lines(source / "train.jsonl", [ROWS["gsm8k"](n) for n in range(1, 8)])
    standin.add("dataset", "org/set", source)
    command = [sys.executable, "-m", "tandem.launch.cli", "ingest", "org/set:train", "--json"]
    for offline in ("0", "1"):
        environment["HF_HUB_OFFLINE"] = offline
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[0]["kept"] == 7
    command[-2] = "org/set:test"
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert "HF_HUB_OFFLINE is set" in done.stderr


CACHED = """
import sys
from tandem.common import hub
print(hub.cached_data(sys.argv[1]))
"""


def test_of_two_processes_that_want_a_data_set_one_fetches_it_at_a_time(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    content = np.random.default_rng(0).bytes(3 << 20)
    standin.repos["dataset", "org/set"] = {"train.jsonl": content}
    standin.stall_after = 2 << 20
    command = [sys.executable, "-c", CACHED, "org/set"]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    assert standin.stalled.wait(60)
    second = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert second.stderr is not None
        assert second.stderr.readline() == "waiting for another process that fetches org/set\n"
        first.kill()
        # What the first has got is taken over.
        folder = Path(second.communicate(timeout=60)[0].splitlines()[-1])
    finally:
        first.kill()
        first.wait(10)
        second.kill()
        second.wait(10)
    assert (folder / "train.jsonl").read_bytes() == content
    fetched = [asked for _, path, asked in standin.requests if path.endswith("train.jsonl")]
    assert len(fetched) == 2


def test_who_waits_for_a_download_that_gets_nowhere_is_told_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "SILENT_SECONDS", 0.0)
    folder = tmp_path / "tandem" / "org--set"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "ab") as lock:
        assert try_lock(lock.fileno())
        with pytest.raises(DataError, match=r"fuser .*/org--set/\.lock` names it"):
            hub.cached_data("org/set")
        # It was there just before the lock was had.
        (folder / ".complete").touch()
        assert hub.cached_data("org/set") == folder


def test_benchmarks_are_fetched_to_where_they_are_found_by_name(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    from tandem.common.evaluation_sets import named

    source = tmp_path / "source"
    (source / "main").mkdir(parents=True)
    write_lines(source / "main" / "test.jsonl", [ROWS["gsm8k"](n) for n in range(1, 8)])
    standin.add("dataset", "openai/gsm8k", source)
    done = get(environment, tmp_path, "benchmarks", "gsm8k", "aime25")
    assert done.returncode != 0
    assert "1 of 2 benchmarks can't be fetched: aime25" in done.stderr
    folder = tmp_path / "benchmarks"
    assert [one.name for one in folder.iterdir() if not one.name.startswith(".")] == ["gsm8k"]
    (entry,) = named("gsm8k", folder)
    assert (entry["path"], entry["rows"]) == (str(folder / "gsm8k"), 1319)
    # What is there isn't asked for again.
    asked = len(standin.requests)
    assert get(environment, tmp_path, "benchmarks", "gsm8k").returncode == 0
    assert len(standin.requests) == asked
    assert "did you mean gsm8k" in get(environment, tmp_path, "benchmarks", "gsm8").stderr


def test_what_is_not_there_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    for words in (["model", "org/none"], ["data", "org/none:train"]):
        done = get(environment, tmp_path, *words)
        assert done.returncode != 0
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "org/none can't be fetched from http://127.0.0.1" in done.stderr
    assert "write org/name" in get(environment, tmp_path, "model", "tiny").stderr


def test_which_files_hold_a_split() -> None:
    def chosen(name: str, *files: str) -> list[str]:
        wanted = hub.HubData.parse(name)
        assert wanted is not None
        return wanted.chosen(files)

    files = ("train.jsonl", "data/train-00000-of-00001.parquet", "test.json", "main/test.parquet")
    assert chosen("o/s:train", *files) == list(files[:2])
    assert chosen("o/s/main:test", *files) == ["main/test.parquet"]
    assert chosen("o/s", *files, "README.md", "dataset_infos.json") == list(files)
    assert chosen("o/s:train", "training.jsonl", "restrain.jsonl") == []
    # A word of a name counts only where no name begins with the split.
    named = ("train_1M.jsonl", "train_2M-00000-of-00001.parquet", "math-train.json")
    assert chosen("o/s:train", *named) == list(named)
    assert chosen("o/s:train", *named, "train.jsonl") == ["train.jsonl"]
    assert chosen("o/s:train", *named, "train/a.jsonl") == ["train/a.jsonl"]
    assert chosen("o/s:train_1M", *named, "train.jsonl") == ["train_1M.jsonl"]


PREPARED = """
import json, sys
from tandem.common.config import build
from tandem.common.run_folder import RunFolder
from tandem.launch.ingest.prepare import inputs_digest, prepare
tree = {"run": {"steps": 1}, "model": {"path": "miniature"}, "expert": {"per_group": 0}}
tree["rollout"] = {"max_new_tokens": 32}
tree["data"] = {"max_prompt_tokens": 200} | {"train": [{"path": sys.argv[1]}], "evaluate": json.loads(sys.argv[2])}
config = build(tree, stored=True)
print(inputs_digest(config, RunFolder("run")))
made = prepare(config, RunFolder("run"))
print(json.dumps({name: [one.prompt_text for one in problems] for name, problems in made.evaluate.items()}))
"""


@pytest.mark.byhand
def test_a_run_reads_the_revision_of_a_set_that_it_names(
    standin: StandinHub, environment: dict[str, str], tmp_path: Path
) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(8)]
    write_lines(tmp_path / "train.jsonl", rows)
    for name, some in (("old", rows[:3]), ("new", rows[3:])):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "test.jsonl", some)
    commit = "a" * 40
    standin.add("dataset", "org/set", tmp_path / "new")
    standin.add("dataset", "org/set", tmp_path / "old", commit)
    sets = [{"path": "org/set:test", "name": "pinned", "revision": commit}]
    sets.append({"path": "org/set:test", "name": "newest"})
    command = [sys.executable, "-c", PREPARED, str(tmp_path / "train.jsonl"), json.dumps(sets)]

    def prepared() -> tuple[str, dict[str, list[str]]]:
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        digest, found = done.stdout.splitlines()
        return digest, json.loads(found)

    digest, found = prepared()
    assert {name: len(prompts) for name, prompts in found.items()} == {"pinned": 3, "newest": 5}
    assert all(f"{n} + {n}" in prompt for n, prompt in enumerate(found["pinned"]))
    # What the digest is of are the pinned rows too.
    (pinned,) = (tmp_path / "hf" / "tandem").glob(f"*{commit}/test.jsonl")
    pinned.write_text(pinned.read_text().replace("1 + 1", "1 + 2"))
    assert prepared()[0] != digest
