"""report.png: drawn from whatever metrics there are, in a process that can't fail the run."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from board_examples import evaluated, record
from PIL import Image

from tandem.common.errors import DataError
from tandem.common.run_folder import RunFolder
from tandem.launch.board import report
from tandem.launch.commands import offline


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path)
    made.write_run({"preset": "miniature"})
    return made


def write(folder: RunFolder, *records: dict) -> None:
    folder.metrics.write_text("".join(json.dumps(one) + "\n" for one in records))


def test_a_process_of_its_own_draws_it(folder: RunFolder) -> None:
    steps = [record(n, **{"train/lr": 1e-3, "train/ratio_max": 1.0 + n}) for n in range(1, 101)]
    write(folder, evaluated(0, 0.0), *steps, evaluated(100, 0.5))
    assert report.Drawing(folder).wait() == ""
    with Image.open(folder.report) as image:
        assert image.size == (1200, 1000)
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 50
    assert [path.name for path in folder.path.glob("*.png")] == ["report.png"]


def test_a_run_without_rewards_or_evaluations_is_drawn_too(folder: RunFolder) -> None:
    write(folder, {"step": 1, "train/lr": 1e-3, "train/loss": None}, {"step": 2, "train/lr": 1e-3})
    assert report.draw(folder).exists()


def test_the_only_source_of_a_held_out_set_has_no_line_of_its_own() -> None:
    from matplotlib.figure import Figure

    def lines(*names: str) -> list[str]:
        axis = Figure().subplots()
        accuracies = {f"eval/{name}/accuracy": 0.5 for name in names}
        report._accuracy(axis, [{"step": 1, **accuracies}])
        return [str(line.get_label()) for line in axis.get_lines()]

    assert lines("one", "one/source/a") == ["one"]
    several = ["one", "one/source/a", "one/source/b"]
    assert lines(*several, "two", "two/source/a") == [*several, "two"]


def test_why_there_is_no_report_is_one_line(folder: RunFolder) -> None:
    assert report.Drawing(folder).wait() == f"{folder.metrics} has no steps to draw"
    folder.metrics.write_text("no json\n" * 3)
    assert report.Drawing(folder).wait() == f"{folder.metrics} has no steps to draw"
    assert not folder.report.exists()


def test_a_damaged_line_of_the_metrics_keeps_no_report_and_no_step_from_being_shown(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, *(record(n, **{"train/lr": 1e-3}) for n in range(1, 4)))
    folder.metrics.write_text(folder.metrics.read_text().replace('"step": 2', '"step": ?'))
    assert report.Drawing(folder).wait() == ""
    assert folder.report.exists()
    offline._print(folder, 3)
    assert "train/lr" in capsys.readouterr().out
    assert "left out: line 2 of" in caplog.text


def test_without_matplotlib_it_says_how_to_get_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, record(1, **{"train/lr": 1e-3}))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DataError, match="pip install matplotlib"):
        report.draw(folder)


def test_a_drawing_that_hangs_is_ended(folder: RunFolder) -> None:
    write(folder, record(1, **{"train/lr": 1e-3}))
    drawing = report.Drawing(folder)
    assert drawing.wait(seconds=0.0) == "it took longer than 0 s"
    assert not folder.report.exists()


def test_a_long_run_is_thinned_out(folder: RunFolder) -> None:
    steps, values = report.series([record(n) for n in range(1, 10_001)], "reward/mean")
    assert len(steps) == len(values) == report.POINTS
    assert steps[:3] == [1, 6, 11]


def test_a_drawing_that_takes_too_long_is_ended(folder: RunFolder) -> None:
    write(folder, record(1, **{"train/lr": 1e-3}))
    drawing = report.Drawing(folder)
    process = drawing._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    assert drawing.wait(0.05) == "it took longer than 0 s"
    assert process.returncode == -signal.SIGKILL


def test_one_that_can_not_be_ended_is_left_behind_with_a_word(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, record(1, **{"train/lr": 1e-3}))
    monkeypatch.setattr(report, "REAP_SECONDS", 0.05)
    drawing = report.Drawing(folder)
    process = drawing._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    # As in the kernel: SIGKILL does nothing to it for now.
    monkeypatch.setattr(process, "kill", lambda: None)
    said = drawing.wait(0.05)
    monkeypatch.undo()
    process.kill()
    process.wait(10)
    assert said.endswith(f"process {process.pid} was killed and has not gone")


def test_ctrl_c_ends_the_drawing_and_is_told(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, record(1, **{"train/lr": 1e-3}))
    drawing = report.Drawing(folder)
    process = drawing._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)

    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "communicate", interrupt)
    assert (drawing.wait(), drawing.interrupted) == ("interrupted", True)
    assert process.returncode == -signal.SIGKILL
