"""A Redis whose disk is full refuses writes; its clients wait, and nothing that they wrote is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tandem.common import disk
from tandem.common.errors import StoreError
from tandem.replay import connection
from tandem.replay.connection import Store, connect
from tandem.replay.store import RunStore


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_stop", threading.Event())


@pytest.fixture
def small(small_disk: Callable[[int], Any]) -> Any:
    return small_disk(4)


@pytest.fixture
def store(small: Any, servers: Any) -> Iterator[Store]:
    folder = small.folder / "redis"
    folder.mkdir()
    with servers.running(folder) as server:
        made = connect(server.join(), name="test")
        yield made
        made.close()


def fill(small: Any, store: Store) -> None:
    """Until Redis has noticed."""
    small.fill()
    end = time.monotonic() + 20
    while store.redis.info("persistence")["aof_last_write_status"] == "ok":
        assert time.monotonic() < end
        try:
            store.redis.set("notice", "x" * 8192)
        except connection.ResponseError:
            pass


def meanwhile(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_scripts_commands_and_batches_wait_for_space_and_are_made_once(
    small: Any, store: Store, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world = make.world(store)
    runs = RunStore(store)
    (lease,) = world.lease()
    fill(small, store)
    done: list[object] = []
    writers = [
        meanwhile(lambda: done.append(world.commit([lease]))),
        meanwhile(lambda: done.append(runs.report("rollout-0", {"tokens": 1}))),
        meanwhile(lambda: runs.count_restart("rollout-0", "killed")),
        meanwhile(lambda: runs.put_eval_set("heldout", [make.problem("h/0")])),
    ]
    assert runs.state() == "running"  # Reading goes on.
    end = time.monotonic() + 20
    while caplog.text.count("waits for space on its disk") < len(writers):
        assert time.monotonic() < end, caplog.text
        time.sleep(0.01)
    assert "can't write its append-only file (" in caplog.text
    assert "No space left on device" in caplog.text
    assert not done
    small.empty()
    for writer in writers:
        writer.join(30)
    assert ["committed"] in done
    assert world.ledger.counts()["graded"] == 1
    assert runs.reports() == {"rollout-0": {"tokens": 1}}
    assert runs.restart_count() == 1
    assert runs.eval_set_names() == ["heldout"]


def test_the_wait_ends_at_its_bound_and_when_the_process_is_to_end(
    small: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(small, store)
    monkeypatch.setattr(disk, "_patience", 0.2)
    with pytest.raises(StoreError, match="make room on the disk of the run's folder"):
        RunStore(store).report("rollout-0", {})
    monkeypatch.setattr(disk, "_patience", 600.0)
    disk.stop_waiting()
    with pytest.raises(StoreError, match="No space left"):
        RunStore(store).report("rollout-0", {})


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_a_full_disk_says_is_told_from_other_errors(wrapped: bool) -> None:
    misconf = "MISCONF Errors writing to the AOF file: No space left on device"
    text = f"Error running script (call to f_1): @user_script:1: -{misconf}" if wrapped else misconf
    assert connection._disk_is_full(connection.ResponseError(text))
    refused = connection.ResponseError("REFUSED take: argument 3 (step) is ': -MISCONF '")
    assert not connection._disk_is_full(refused)
