"""``tandem view``: which logs it writes, and what it becomes."""

from __future__ import annotations

import os
import socket
import zipfile
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError, DataError
from tandem.launch import cli


def standing_in(tmp_path: Path) -> Path:
    """A program in the place of Inspect's, which tells how it was called."""
    program = tmp_path / "inspect"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "called"}\n')
    program.chmod(0o755)
    return program


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of what a finished run has kept."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "config.yaml", "samples.jsonl"):
        os.link(finished_run / name, folder / name)
    return folder


def test_a_runs_samples_are_written_and_the_viewer_is_started_on_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dispatch(["view", str(run), "--write"]) == 0
    logs = sorted((run / "inspect").iterdir())
    # 250 steps in blocks of 20.
    assert len(logs) == 13
    assert capsys.readouterr().out == f"13 logs in {run / 'inspect'}\n"
    with zipfile.ZipFile(logs[0]) as log:
        names = log.namelist()
    # Two groups of eight samples a step.
    assert len(names) == 20 * 2 * 8 + 2
    program = standing_in(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            cli.dispatch(["view", str(run), "--inspect", str(program), "--port", "0"])
        finally:
            os._exit(99)
    assert os.waitpid(child, 0)[1] == 0
    called = (tmp_path / "called").read_text().split()
    assert called[:4] == ["view", "start", "--log-dir", str(run / "inspect")]
    assert called[4:] == ["--host", "127.0.0.1", "--port", "0"]


def test_a_folder_of_logs_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.eval").touch()
    assert cli.dispatch(["view", str(tmp_path), "--write"]) == 0
    assert capsys.readouterr().out == f"1 log in {tmp_path}\n"


def test_what_is_missing_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="neither a run's folder nor an evaluation's"):
        cli.dispatch(["view", str(tmp_path), "--write"])
    with pytest.raises(ConfigError, match="no such program"):
        cli.dispatch(["view", str(tmp_path), "--inspect", str(tmp_path / "none")])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install inspect-ai"):
        cli.dispatch(["view", str(tmp_path)])
    (tmp_path / "x.eval").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}"):
            cli.dispatch(
                [
                    "view",
                    str(tmp_path),
                    "--inspect",
                    str(standing_in(tmp_path)),
                    "--port",
                    str(port),
                ]
            )
