"""A run while its processes are being started."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tandem.common.disk import DiskFull
from tandem.common.errors import StoreError, TandemError
from tandem.common.run_folder import JoinInfo
from tandem.launch.board.terminal import Terminal
from tandem.launch.host.folder_lock import FolderLock
from tandem.launch.run.opened.opening import open_folder
from tandem.launch.run.opened.presets import load
from tandem.launch.run.opened.record import RunRecord
from tandem.launch.run.running import Running


@pytest.mark.parametrize(
    ("error", "state"),
    [(StoreError("Redis doesn't answer"), "failed"), (DiskFull("no space"), "stopped")],
)
def test_a_run_that_ends_before_its_processes_are_up_is_starting_no_longer(
    error: TandemError, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tandem.launch.run.processes.redis_part.part", lambda *_, **__: None)
    monkeypatch.setattr("tandem.launch.run.processes.redis_part.await_ready", refuse)
    preset = load("miniature")
    opening = open_folder(preset, [f"run.dir={tmp_path / 'run'}"], fresh=False)
    opening.folder.make()
    record = RunRecord(opening, time.time())
    record.begin(preset, opening, 1)
    terminal = Terminal(plain=True)
    running = Running(opening.config, opening.folder, preset.name, record, terminal)
    join = JoinInfo(run_id="r", host="127.0.0.1", port=1)
    with pytest.raises(type(error)):
        running.run(join, FolderLock(opening.folder), lambda _: None, [])
    assert opening.folder.read_run()["state"] == state


def test_a_run_goes_on_while_its_metrics_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = load("miniature")
    opening = open_folder(preset, [f"run.dir={tmp_path / 'run'}"], fresh=False)
    folder = opening.folder
    folder.make()
    record = RunRecord(opening, time.time())
    record.begin(preset, opening, 1)
    running = Running(opening.config, folder, preset.name, record, Terminal(plain=True))
    folder.metrics.write_text('{"step": 3}\n')
    assert running.step() == 3
    folder.metrics.unlink()
    folder.metrics.mkdir()
    assert [running.step(), running.step()] == [3, 3]
    assert capsys.readouterr().out.count("the run's progress isn't followed: [Errno 21]") == 1
    folder.metrics.rmdir()
    folder.metrics.write_text('{"step": 3}\n{"step": 4}\n')
    assert running.step() == 4
