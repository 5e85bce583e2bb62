"""Real TensorBoard files and real offline W&B runs, made from a run's metrics."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.config import to_yaml
from tandem.common.errors import ConfigError, DataError
from tandem.common.run_folder import RunFolder
from tandem.launch import cli
from tandem.launch.board.tail import MetricsTail
from tandem.launch.host.preflight import check_trackers
from tandem.launch.run.opened.presets import load
from tandem.launch.trackers.following import Following, Sent
from tandem.launch.trackers.tracker import Tracker
from tandem.launch.trackers.wandb_run import has_key, kept_here, mode_of, place_of, wandb_id_of

RUN_ID = "0123456789ab"


def step(number: int, **more: float | None) -> dict:
    return {"step": number, "term": 1, "time": 1000.0 + number, "train/loss": 0.5 * number, **more}


def evaluation(number: int, accuracy: float) -> dict:
    return {
        "step": number,
        "term": 1,
        "time": 1000.5 + number,
        "eval/id": f"heldout@{number}",
        "eval/heldout/accuracy": accuracy,
    }


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "runs" / "mine")
    made.make()
    made.config.write_text(to_yaml(load("miniature").resolve([f"run.dir={made.path}"])))
    made.write_run({"run_id": RUN_ID, "preset": "miniature", "state": "stopped"})
    return made


def write(folder: RunFolder, *records: dict) -> None:
    with open(folder.metrics, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def track(folder: RunFolder, to: str, **environment: str) -> str:
    """`tandem track` in a process of its own, as a run starts it."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandem.launch.cli", "track", str(folder.path), "--to", to],
        capture_output=True,
        text=True,
        timeout=100,
        env={key: value for key, value in os.environ.items() if key != "WANDB_MODE"}
        | {"HOME": str(folder.path)}
        | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- each record once ---


class Recorder(Tracker):
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, dict]] = []
        self.alarms: list[tuple[int, str]] = []

    def log(self, row: int, step: int, time: float, metrics: object) -> None:
        self.rows.append((row, step, dict(metrics)))  # type: ignore[call-overload]

    def alarm(self, step: int, time: float, text: str) -> None:
        self.alarms.append((step, text))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def following(folder: RunFolder, recorder: Recorder) -> Following:
    state = folder.trackers / "recorder.json"
    return Following(recorder, folder.metrics, state, Sent.read(state))


def test_steps_that_a_restarted_learner_repeats_are_not_sent_again(folder: RunFolder) -> None:
    recorder = Recorder()
    follower = following(folder, recorder)
    write(folder, step(1), step(2), evaluation(0, 0.25), step(3))
    assert follower.catch_up() == 4
    # The learner cut its file back to step 1 and went on from there.
    old, new = folder.metrics, folder.metrics.with_suffix(".new")
    folder.metrics = new
    write(folder, step(1), step(2), evaluation(0, 0.25), step(3), step(4), evaluation(2, 0.5))
    os.replace(new, old)
    folder.metrics = old
    assert follower.catch_up() == 2
    assert [(row, number) for row, number, _ in recorder.rows] == [
        *((0, 1), (1, 2), (2, 0), (3, 3), (4, 4), (5, 2))
    ]


def test_another_process_goes_on_where_the_last_one_was(folder: RunFolder) -> None:
    write(folder, step(1), step(2))
    following(folder, Recorder()).catch_up()
    write(folder, step(3))
    recorder = Recorder()
    following(folder, recorder).catch_up()
    assert recorder.rows == [(2, 3, {"train/loss": 1.5})]


def test_what_was_sent_before_an_interruption_is_not_sent_again(folder: RunFolder) -> None:
    write(folder, *(step(number) for number in range(1, 2601)))
    stop = threading.Event()

    class Interrupted(Recorder):
        def log(self, row: int, step: int, time: float, metrics: object) -> None:
            super().log(row, step, time, metrics)
            if step == 300:
                stop.set()
            if step == 2500:
                raise OSError("the server is gone")

    first, second, third = Interrupted(), Interrupted(), Recorder()
    assert following(folder, first).catch_up(stop) == 300
    stop.clear()
    with pytest.raises(OSError, match="gone"):
        following(folder, second).catch_up(stop)
    # A server that fails has taken what was sent before, but for the last thousand at most.
    assert following(folder, third).catch_up() == 300
    sent = [number for one in (first, second) for _, number, _ in one.rows]
    assert sent == list(range(1, 2501))
    assert [(row, number) for row, number, _ in third.rows] == [
        (number - 1, number) for number in range(2301, 2601)
    ]


def test_a_step_that_stopped_the_run_is_sent_again_once_it_is_trained(folder: RunFolder) -> None:
    halted = {name: value for name, value in step(2).items() if name != "train/loss"}
    halted["train/applied"] = 0.0
    write(folder, step(1), halted)
    assert following(folder, Recorder()).catch_up() == 2
    # It stops there once more, from which a tracker that was started anew has nothing to send.
    assert following(folder, Recorder()).catch_up() == 0
    # The learner has set the record aside, and goes on with learner.ratio_check.on_alarm=tell.
    folder.metrics.unlink()
    write(folder, step(1), step(2, **{"train/applied": 1.0}), step(3))
    recorder = Recorder()
    assert following(folder, recorder).catch_up() == 2
    assert [(row, number) for row, number, _ in recorder.rows] == [(2, 2), (3, 3)]
    assert recorder.rows[0][2] == {"train/loss": 1.0, "train/applied": 1.0}
    assert following(folder, Recorder()).catch_up() == 0


def test_how_held_out_pairs_are_preferred_is_sent_beside_their_step(folder: RunFolder) -> None:
    pairs = {"step": 2, "term": 1, "time": 1002.5, "heldout/preference_pairs": 8.0}
    write(folder, step(1), step(2), pairs)
    recorder = Recorder()
    assert following(folder, recorder).catch_up() == 3
    write(folder, pairs)
    assert following(folder, recorder).catch_up() == 0
    assert recorder.rows[-1] == (2, 2, {"heldout/preference_pairs": 8.0})


def test_bookkeeping_and_nulls_are_not_sent(folder: RunFolder) -> None:
    write(folder, step(1, **{"train/k3": None}), evaluation(1, 0.5))
    recorder = Recorder()
    following(folder, recorder).catch_up()
    assert [metrics for _, _, metrics in recorder.rows] == [
        {"train/loss": 0.5},
        {"eval/heldout/accuracy": 0.5},
    ]


ALARM = {
    "ratio/alarm": 1.0,
    "ratio/lag": 0.0,
    "ratio/tokens": 7.0,
    "ratio/k3": 0.5,
    "ratio/k3_bound": 1e-8,
}
TEXT = (
    "log-probs as sampled and as learned differ (lag 0, 7 tokens): mean k3(μ‖π) 0.5 (bound 1e-08)"
)


def test_an_alarm_is_told_once_beside_its_figures(folder: RunFolder) -> None:
    write(folder, step(1), step(2, **ALARM), step(3, **{**ALARM, "ratio/alarm": 0.0}))
    recorder = Recorder()
    following(folder, recorder).catch_up()
    assert recorder.alarms == [(2, TEXT)]
    assert [metrics["ratio/alarm"] for _, _, metrics in recorder.rows[1:]] == [1.0, 0.0]
    following(folder, again := Recorder()).catch_up()
    assert again.alarms == []


def test_what_a_server_lacks_is_sent_again_under_the_same_numbers(folder: RunFolder) -> None:
    def go_back(follower: Following, rows: int) -> None:
        follower._sent.go_back(rows, MetricsTail(folder.metrics).records())

    write(folder, step(1), evaluation(0, 0.25), step(2), step(3), evaluation(2, 0.5))
    following(folder, Recorder()).catch_up()
    write(folder, step(4))
    follower = following(folder, recorder := Recorder())
    go_back(follower, 2)
    assert follower.catch_up() == 4
    assert [(row, number) for row, number, _ in recorder.rows] == [(2, 2), (3, 3), (4, 2), (5, 4)]
    assert recorder.rows[2][2] == {"eval/heldout/accuracy": 0.5}
    # Of evaluations alone no step is sent with them.
    write(folder, evaluation(4, 0.75))
    follower.catch_up()
    follower = following(folder, again := Recorder())
    go_back(follower, 6)
    assert follower.catch_up() == 1
    assert [(row, number) for row, number, _ in again.rows] == [(6, 4)]
    # A learner that was started again has cut the metrics back, and the evaluation comes later than it did.
    folder.metrics.unlink()
    write(folder, step(1), step(2), step(3), step(4), step(5), evaluation(0, 0.25))
    write(folder, evaluation(2, 0.5), evaluation(4, 0.75))
    follower = following(folder, moved := Recorder())
    go_back(follower, 6)
    assert follower.catch_up() == 2
    assert [(row, number) for row, number, _ in moved.rows] == [(6, 5), (7, 4)]
    # Records that are cut off altogether leave their numbers taken.
    folder.metrics.unlink()
    write(folder, step(1), step(5))
    follower = following(folder, last := Recorder())
    go_back(follower, 6)
    assert follower.catch_up() == 0
    write(folder, step(6))
    follower.catch_up()
    assert [(row, number) for row, number, _ in last.rows] == [(6, 6)]


def test_a_damaged_state_is_told(folder: RunFolder) -> None:
    folder.trackers.mkdir()
    (folder.trackers / "recorder.json").write_text("{")
    with pytest.raises(DataError, match=r"recorder\.json is damaged"):
        following(folder, Recorder())


# --- TensorBoard ---


def test_tensorboard_reads_a_resumed_run_as_one(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(folder, step(1), step(2, **ALARM), evaluation(0, 0.25))
    assert "3 records sent (3 in all)" in track(folder, "tensorboard")
    write(folder, step(3), evaluation(3, 0.75))
    assert "2 records sent (5 in all)" in track(folder, "tensorboard")
    log = EventAccumulator(str(folder.tensorboard))
    log.Reload()
    assert [(e.step, e.value, e.wall_time) for e in log.Scalars("train/loss")] == [
        *((1, 0.5, 1001.0), (2, 1.0, 1002.0), (3, 1.5, 1003.0))
    ]
    assert [(e.step, e.value) for e in log.Scalars("eval/heldout/accuracy")] == [
        (0, 0.25),
        (3, 0.75),
    ]
    (config,) = log.Tensors("config")
    text = config.tensor_proto.string_val[0].decode()
    shown = yaml.safe_load(text.removeprefix("```yaml\n").removesuffix("```"))
    assert shown["run"]["dir"] == str(folder.path)
    (alarm,) = log.Tensors("alarm")
    assert (alarm.step, alarm.wall_time) == (2, 1002.0)
    assert alarm.tensor_proto.string_val[0].decode() == TEXT


# --- W&B ---


def test_wandb_goes_on_in_the_same_run(folder: RunFolder) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "wandb_file", Path(__file__).parent / "wandb_file.py"
    )
    assert spec is not None
    assert spec.loader is not None
    wandb_file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wandb_file)

    folder.write_run({**folder.read_run(), **place_of(folder.path)})
    write(folder, step(1), step(2), evaluation(0, 0.25))
    said = track(folder, "wandb", WANDB_API_KEY="")
    assert "W&B goes offline: there is no API key" in said
    assert "wandb sync" in said
    write(folder, step(3, **ALARM))
    track(folder, "wandb", WANDB_API_KEY="")
    files = sorted(folder.wandb.glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    first, second = (wandb_file.read(file) for file in files)
    assert [wandb_file.alerts(file) for file in files] == [[], [f"Step 3: {TEXT}"]]
    for about, _ in (first, second):
        assert about == {"id": RUN_ID, "project": "tandem", "name": "mine"}
    # A copy is a run of its own there, and gets every record.
    copy = RunFolder(folder.path.with_name("copy"))
    shutil.copytree(folder.path, copy.path, ignore=shutil.ignore_patterns("wandb"))
    assert "4 records sent (4 in all)" in track(copy, "wandb", WANDB_API_KEY="")
    (file,) = copy.wandb.glob("offline-run-*/run-*.wandb")
    about, copied = wandb_file.read(file)
    assert about["id"].startswith(f"{RUN_ID}-")
    assert len(copied) == 4
    rows = [*first[1], *second[1]]
    assert [(row["_step"], row["step"]) for row in rows] == [(0, 1), (1, 2), (2, 0), (3, 3)]
    assert rows[2]["eval/heldout/accuracy"] == 0.25
    assert rows[3]["train/loss"] == 1.5


class Server:
    """Stands for W&B's library and its server, which has so many rows."""

    def __init__(self, rows: int = 0, *, hangs: bool = False) -> None:
        self.step = rows
        self.rows: list[tuple[int, int]] = []
        self.settings: Any = None
        self._hangs = hangs

    def init(self, *, settings: Any, mode: str, **_: object) -> Server:
        assert mode == "online"
        self.settings = settings
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, row: dict[str, Any], *, step: int) -> None:
        self.rows.append((step, row["step"]))

    def finish(self) -> None:
        if self._hangs and self.settings.finish_timeout_raises:
            raise TimeoutError("Timed out finishing run.")


@pytest.fixture
def online(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], int]:
    """`tandem track` to a server; returns the exit code."""
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "x")

    def track(server: Server) -> int:
        monkeypatch.setattr(wandb, "init", server.init)
        return cli.main(["track", str(folder.path), "--to", "wandb"])

    return track


def test_rows_that_wandb_has_not_uploaded_are_sent_again(
    folder: RunFolder, online: Callable[[Server], int], capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, step(1), step(2), evaluation(0, 0.25), step(3))
    assert online(first := Server()) == 0
    assert first.rows == [(0, 1), (1, 2), (2, 0), (3, 3)]
    # The tracker was killed, and half of it had arrived.
    write(folder, step(4))
    assert online(second := Server(2)) == 0
    assert second.rows == [(2, 0), (3, 3), (4, 4)]
    assert "the server has 2 of 4 records: the rest is sent again" in capsys.readouterr().out
    assert online(third := Server(5)) == 0
    assert third.rows == []


def test_records_that_did_not_arrive_by_the_end_are_told(
    folder: RunFolder, online: Callable[[Server], int], capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, step(1), step(2))
    assert online(Server(hangs=True)) == 1
    said = capsys.readouterr().err
    assert "W&B's server hasn't got all records in 30 s" in said
    assert f"track {folder.path} --to wandb` sends what it lacks" in said
    assert online(later := Server()) == 0
    assert later.rows == [(0, 1), (1, 2)]


def test_a_copy_is_a_run_of_its_own_in_wandb(folder: RunFolder) -> None:
    """Also after it has been started, which writes where it lies into its record."""
    folder.write_run({"run_id": RUN_ID, **place_of(folder.path)})
    assert wandb_id_of(folder.read_run(), folder.path) == RUN_ID
    copy = folder.path.with_name("copy")
    shutil.copytree(folder.path, copy)
    record = RunFolder(copy).read_run()
    own = wandb_id_of(record, copy)
    assert own.startswith(f"{RUN_ID}-")
    assert wandb_id_of({**record, "wandb_id": own, **place_of(copy)}, copy) == own
    again = copy.with_name("again")
    shutil.copytree(copy, again)
    assert wandb_id_of(record, again) not in (RUN_ID, own)


def test_a_folder_that_was_renamed_goes_on_in_its_wandb_run(folder: RunFolder) -> None:
    folder.write_run({"run_id": RUN_ID, **place_of(folder.path)})
    moved = folder.path.rename(folder.path.with_name("moved"))
    assert wandb_id_of(RunFolder(moved).read_run(), moved) == RUN_ID


def test_no_key_means_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    def settings_are_read_again() -> None:
        wandb.teardown()

    names = ("API_KEY", "MODE", "BASE_URL", "CONFIG_DIR", "IDENTITY_TOKEN_FILE")
    for name in ("NETRC", *(f"WANDB_{name}" for name in names)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings_are_read_again()
    assert not has_key()
    assert mode_of("online")[0] == "offline"
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert mode_of("online") == ("online", None)
    # `wandb login --host` writes the server into W&B's settings.
    kept = tmp_path / ".config" / "wandb" / "settings"
    kept.parent.mkdir(parents=True)
    kept.write_text("[default]\nbase_url = https://wandb.mine:8080\n")
    settings_are_read_again()
    assert not has_key()
    netrc.write_text("machine wandb.mine:8080 login user password x\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    settings_are_read_again()
    assert not has_key()
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    assert has_key()
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert mode_of("online") == ("online", None)
    assert mode_of("offline") == ("offline", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert mode_of("online") == ("offline", "WANDB_MODE=offline")
    settings_are_read_again()


def test_what_wandb_has_kept_here_is_named_with_the_command_that_uploads_it(
    folder: RunFolder,
) -> None:
    write(folder, step(1))
    assert kept_here(folder.path, 0.0) == ""
    assert "W&B goes offline" in track(folder, "wandb")
    (made,) = (folder.path / "wandb").glob("offline-run-*")
    assert kept_here(folder.path, 0.0) == f"wandb sync {made}"
    assert kept_here(folder.path, made.stat().st_mtime + 1) == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once_what_waits_for_the_server(
    folder: RunFolder, number: signal.Signals
) -> None:
    write(folder, step(1))
    command = ["track", str(folder.path), "--to", "wandb"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        own = {
            "HOME": str(folder.path),
            "WANDB_API_KEY": 40 * "a",
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
        }
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem.launch.cli", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "WANDB_MODE"} | own,
        ) as process:
            assert process.stderr is not None
            try:
                # It accepts, and never answers.
                connection, _ = server.accept()
                process.send_signal(number)
                assert "stopping; once more ends it at once\n" in process.stderr
                process.send_signal(number)
                assert process.wait(10) == -number
            finally:
                process.kill()
            connection.close()


# --- before a start ---


@pytest.mark.parametrize(
    ("setting", "package"),
    [("log.wandb=offline", "wandb"), ("log.tensorboard=true", "tensorboard")],
)
def test_a_tracker_without_its_package_is_refused_at_the_start(
    setting: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("miniature").resolve([setting])
    check_trackers(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{setting} .* -m pip install {package}`"):
        check_trackers(config)
    check_trackers(load("miniature").resolve([]))
