"""A password in ``replay.redis_url`` is in what is private, or is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tandem.launch.cli import main

URL = "redis://me:marker@redis.example:6380/2"
FORMS = [f"replay.redis_url={URL}", f"replay={{redis_url: '{URL}', window: 2}}"]


@dataclass(frozen=True, slots=True)
class Done:
    """How a command has ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command as a shell would call it: the files' first lines have its words."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["tandem", "cluster", *words])
        code = main()
        return Done(code, *capsys.readouterr())

    return call


def holding(folder: Path) -> set[str]:
    return {
        path.name for path in folder.rglob("*") if path.is_file() and "marker" in path.read_text()
    }


@pytest.mark.parametrize("word", FORMS)
@pytest.mark.parametrize(
    ("engine", "private"), [("kubernetes", "secret.yaml"), ("skypilot", "join.json")]
)
def test_it_is_in_the_private_file_alone(
    tmp_path: Path, cluster: Callable[..., Done], engine: str, private: str, word: str
) -> None:
    done = cluster(engine, "miniature", word, "--out", "made")
    assert done.returncode == 0, done.stderr
    assert "marker" not in done.stdout + done.stderr
    assert holding(tmp_path) == {private}
    text = (tmp_path / "made" / private).read_text()
    if engine == "kubernetes":
        text = yaml.safe_load(text)["stringData"]["join.json"]
    assert json.loads(text)["password"] == "marker"
    printed = cluster(engine, "miniature", word)
    assert printed.returncode == 0, printed.stderr
    assert "redis.example:6380/2" in printed.stdout
    assert "marker" not in printed.stdout


@pytest.mark.parametrize("engine", ["kubernetes", "skypilot"])
def test_that_none_is_known_is_told(
    cluster: Callable[..., Done], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_REDIS_PASSWORD", raising=False)
    words = (engine, "miniature", "replay.redis_url=redis://redis.example", "--out", "made")
    note = "note: no password for Redis at redis.example:6379 is known here"
    assert note in cluster(*words).stderr
    assert note not in cluster(engine, "miniature", "--out", "own").stderr
    monkeypatch.setenv("TANDEM_REDIS_PASSWORD", "marker")
    assert note not in cluster(*words).stderr
    monkeypatch.delenv("TANDEM_REDIS_PASSWORD")
    # It stays in the file.
    assert note not in cluster(*words).stderr


@pytest.mark.parametrize("word", FORMS)
def test_slurm_has_no_place_for_it(tmp_path: Path, cluster: Callable[..., Done], word: str) -> None:
    done = cluster("slurm", "miniature", word, "--out", "made")
    assert done.returncode == 2
    assert "TANDEM_REDIS_PASSWORD" in done.stderr
    assert "marker" not in done.stdout + done.stderr
    assert holding(tmp_path) == set()
