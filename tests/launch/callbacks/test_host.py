"""Callbacks over a run's metrics: what they are called for, and what reaches the learner through a real Redis."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tandem.common.config import Config
from tandem.common.run_folder import RunFolder
from tandem.launch.callbacks.host import Host, Tally, read_tallies, switched_off
from tandem.launch.wording import shown
from tandem.learner.loop.callbacks import Callbacks
from tandem.replay.callback_requests import CallbackRequests, Requested, Stop
from tandem.replay.connection import Store, connect

MODULE = """
import os, time

def note(step, metrics, handle):
    with open("calls.txt", "a") as file:
        print(step, *sorted(metrics.items()), file=file)

def other(step, metrics, handle):
    with open("others.txt", "a") as file:
        print(step, file=file)

def raises(step, metrics, handle):
    raise ValueError("first" if step < 3 else "later")

def ends(step, metrics, handle):
    os._exit(7)

def hangs(step, metrics, handle):
    time.sleep(1000)

def asks(step, metrics, handle):
    if step == 2:
        handle.checkpoint()
        handle.log("two", 2.0)
    if step == 3:
        handle.evaluate()
        handle.log("three", 3.0)
        handle.stop("three is enough")
    if step == 4:
        handle.stop("a later reason")

def many(step, metrics, handle):
    for number in range(60):
        handle.log(f"s{step}/n{number}", number)
"""
DEADLINE = 40.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    (tmp_path / "hosted.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    made = RunFolder(tmp_path / "run")
    made.make()
    made.write_run({"run_id": "0123456789ab", "began": 100.0})
    return made


@pytest.fixture
def store(server: Any) -> Iterator[Store]:
    made = connect(server.join(), name="callbacks")
    yield made
    made.close()


def write(folder: RunFolder, *records: dict[str, Any]) -> None:
    with open(folder.metrics, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "term": 1, "time": 100.0 + number, "train/loss": number / 2, **more}


def config(*names: str, **settings: Any) -> Config:
    callbacks = [f"hosted:{name}" for name in names]
    run = {"steps": 9, "callbacks": callbacks, "callback_memory_mb": 512, **settings}
    data = {
        "train": [{"path": "t.jsonl", "name": "t"}],
        "evaluate": [{"path": "h.jsonl", "name": "h"}],
    }
    model = {"path": "miniature"}
    return Config.model_validate({"run": run, "model": model, "data": data})


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


class Hosted:
    """A host in a thread of its own; at the end it has called for everything that is there."""

    def __init__(self, folder: RunFolder, store: Store, *names: str, **settings: Any) -> None:
        self.printed: list[bytes] = []
        self.host = Host(
            config(*names, **settings), folder, CallbackRequests(store), self.printed.append
        )
        self.thread = threading.Thread(target=self.host.run)

    def __enter__(self) -> Hosted:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.host.end()
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()


def calls(name: str = "calls.txt") -> list[str]:
    path = Path(name)
    return path.read_text().splitlines() if path.exists() else []


def test_each_step_and_each_evaluation_is_a_call_of_its_own(
    folder: RunFolder, store: Store
) -> None:
    evaluation = {"step": 1, "term": 1, "time": 102.5, "eval/id": "h@1", "eval/h/accuracy": 0.5}
    write(folder, step(1, **{"train/k3": None}), step(2), evaluation)
    with Hosted(folder, store, "note", "other"):
        until(lambda: len(calls()) == 3)
        write(folder, step(3))
    assert calls() == [
        "1 ('train/loss', 0.5)",
        "2 ('train/loss', 1.0)",
        "1 ('eval/h/accuracy', 0.5)",
        "3 ('train/loss', 1.5)",
    ]
    assert calls("others.txt") == ["1", "2", "1", "3"]


def test_nothing_is_called_for_twice_by_a_host_that_starts_again(
    folder: RunFolder, store: Store
) -> None:
    write(folder, step(1), step(2))
    with Hosted(folder, store, "note"):
        until(lambda: len(calls()) == 2)
    # A learner that was killed has trained step 2 again.
    folder.metrics.unlink()
    write(folder, step(1), step(2), step(3))
    with Hosted(folder, store, "note"):
        until(lambda: len(calls()) == 3)
    assert [line.split()[0] for line in calls()] == ["1", "2", "3"]


def test_callbacks_that_are_added_later_begin_with_the_steps_that_follow(
    folder: RunFolder, store: Store
) -> None:
    write(folder, step(1, time=50.0), step(2, time=60.0))
    with Hosted(folder, store, "note"):
        write(folder, step(3))
        until(lambda: bool(calls()))
    assert [line.split()[0] for line in calls()] == ["3"]


def test_exceptions_are_logged_once_and_counted(
    folder: RunFolder, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, step(1), step(2), step(3), step(4))
    with Hosted(folder, store, "raises", "note"):
        until(lambda: len(calls()) == 4)
    told = [record.message for record in caplog.records if "raised" in record.message]
    assert [text.rpartition("ValueError: ")[2] for text in told] == ["first", "later"]
    tally = Tally(calls=4, errors=4)
    assert read_tallies(folder.callbacks) == {"hosted:raises": tally, "hosted:note": Tally(calls=4)}
    assert CallbackRequests(store).read().values["failures"][1] == 4.0


@pytest.mark.parametrize("name", ["ends", "hangs"])
def test_a_callback_that_ends_or_hangs_its_process_is_switched_off(
    folder: RunFolder, store: Store, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, *map(step, range(1, 6)))
    with Hosted(folder, store, name, "note", callback_seconds=0.5):
        until(lambda: len(calls()) == 5)
    found = read_tallies(folder.callbacks)
    assert found[f"hosted:{name}"] == Tally(calls=3, ended=3, off=True)
    assert found["hosted:note"] == Tally(calls=5)
    why = "ended with exit code 7" if name == "ends" else r"didn't end in 0.5 s"
    assert sum(why in record.message for record in caplog.records) == 3
    # It stays off when the run is resumed, which says so.
    (told,) = switched_off(config(name, "note"), folder)
    assert told.startswith(f"warning: hosted:{name} is switched off")
    assert f"stop the run, remove {shown(folder.callbacks)} and start again" in told
    write(folder, step(6))
    with Hosted(folder, store, name, "note", callback_seconds=0.5):
        until(lambda: len(calls()) == 6)
    assert read_tallies(folder.callbacks)[f"hosted:{name}"].calls == 3
    folder.callbacks.unlink()
    write(folder, step(7))
    with Hosted(folder, store, name, "note", callback_seconds=0.5):
        until(lambda: len(calls()) == 7)
    assert read_tallies(folder.callbacks)[f"hosted:{name}"].calls == 1


@pytest.mark.parametrize("content", ["{", '{"x": {}, "xxh3": "0"}', "[]"])
def test_a_damaged_file_of_tallies_is_a_warning_at_the_start(
    folder: RunFolder, content: str
) -> None:
    folder.callbacks.parent.mkdir(exist_ok=True)
    folder.callbacks.write_text(content)
    (told,) = switched_off(config("note"), folder)
    assert told.startswith("warning: the callbacks aren't called: ")
    assert f"{folder.callbacks} is damaged" in told
    assert told.endswith("remove it and start again: the counts begin anew")


def test_a_process_that_cannot_be_started_for_a_while_switches_nothing_off(
    folder: RunFolder, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    module = Path("hosted.py")
    module.write_text("import missing_for_a_while")
    with Hosted(folder, store, "note", "other"):
        until(lambda: "can't be started" in caplog.text)
        write(folder, *map(step, range(1, 4)))
        until(lambda: read_tallies(folder.callbacks).get("hosted:other", Tally()).missed == 3)
        module.write_text(MODULE)
        numbers = count(4)

        def another() -> bool:
            write(folder, step(next(numbers)))
            return bool(calls("others.txt"))

        until(another)
    last, made = next(numbers) - 1, len(calls("others.txt"))
    tallies = read_tallies(folder.callbacks)
    assert tallies["hosted:other"] == Tally(calls=made, missed=last - made)
    missed = sum(tally.missed for tally in tallies.values())
    assert CallbackRequests(store).read().values["failures"][1] == missed


def test_a_call_that_hangs_at_the_end_of_the_run_is_cut_short(
    folder: RunFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.launch.callbacks.host.END_SECONDS", 0.5)
    write(folder, step(1), step(2))
    hosted = Hosted(folder, store, "note", "hangs")
    with hosted:
        until(lambda: bool(calls()))
    assert len(calls()) == 1
    # That the run has ended isn't the callback's failure.
    assert read_tallies(folder.callbacks)["hosted:hangs"].ended == 0


def test_requests_reach_the_learner_once(folder: RunFolder, store: Store) -> None:
    learner = Callbacks(store, config("asks"))
    assert learner.look() == {}
    write(folder, *map(step, range(1, 5)))
    requests = CallbackRequests(store)
    with Hosted(folder, store, "asks", "note"):
        until(lambda: len(calls()) == 4 and requests.read().stop is not None)
    assert learner.look() == {"callback/two": 2.0, "callback/three": 3.0}
    assert (learner.take_checkpoint(), learner.take_evaluation()) == (True, True)
    assert (learner.take_checkpoint(), learner.take_evaluation()) == (False, False)
    assert learner.look() == {}
    stop = Stop(callback="hosted:asks", reason="three is enough", step=3)
    assert learner.stop == stop
    # A learner that takes over serves nothing again, but ends the run.
    learner.settle()
    later = Callbacks(store, config("asks"))
    assert later.look() == {}
    assert not later.take_checkpoint()
    assert later.stops()
    assert requests.stopped() is None
    later.ended(stop, 4)
    assert requests.stopped() == stop
    requests.clear()
    assert (requests.read(), requests.stopped(), requests.served()) == (Requested(), None, 0)


def test_a_stop_of_a_callback_that_the_run_no_longer_has_is_forgotten(store: Store) -> None:
    requests = CallbackRequests(store)
    stop = Stop(callback="hosted:asks", reason="three is enough", step=3)
    requests.put(Requested(stop=stop, checkpoint=4))
    requests.put_stopped(stop)
    requests.keep_stops_of(("hosted:note", "hosted:asks"))
    assert (requests.read().stop, requests.stopped()) == (stop, stop)
    requests.keep_stops_of(("hosted:note",))
    assert (requests.read(), requests.stopped()) == (Requested(checkpoint=4), None)
    requests.clear()


def test_a_learner_that_ends_before_it_has_served_leaves_it_to_the_next(
    folder: RunFolder, store: Store
) -> None:
    first = Callbacks(store, config("asks"))
    CallbackRequests(store).put(Requested(checkpoint=1, values={"a": (2, 0.5)}))
    assert first.look() == {"callback/a": 0.5}
    later = Callbacks(store, config("asks"))
    assert later.look() == {"callback/a": 0.5}
    assert later.take_checkpoint()


def test_all_callbacks_together_log_a_bounded_number_of_names(
    folder: RunFolder, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, step(1), step(2), step(3))
    with Hosted(folder, store, "many", "note"):
        until(lambda: len(calls()) == 3)
    assert len(CallbackRequests(store).read().values) == 101
    assert sum("logs more than 100 names" in record.message for record in caplog.records) == 1
