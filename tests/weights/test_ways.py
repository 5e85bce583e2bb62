"""Ways for weights beside one channel to each worker: shared memory, snapshots, one broadcast."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import weight_processes as processes
from raw_worker import RawWorker
from safetensors.torch import load_file
from served import wait_served
from weight_processes import as_bytes, model

from tandem.common.errors import WeightsError
from tandem.common.records import Version
from tandem.common.weights import snapshot, staging, transfers
from tandem.common.weights.protocol import Offer
from tandem.common.weights.shared_memory import SHARED_MEMORY


def v(step: int, term: int = 1) -> Version:
    return Version(term=term, step=step)


def ways(run: Any, **weights: Any) -> dict[str, Any]:
    """Settings for a publisher and its workers."""
    run.config = processes.config(**weights)
    return {"specs": processes.specs_of(model(0, big=True))}


def segments(pid: int) -> set[Path]:
    """Those that a process has mapped and whose files are there."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {Path(line.split(maxsplit=5)[5]) for line in lines if "/tandem-weights-" in line}
    return {path for path in mapped if path.parent == SHARED_MEMORY and path.exists()}


class TestSharedMemory:
    def test_workers_of_a_host_read_the_learners_own_buffer(self, run: Any) -> None:
        options = ways(run, transport="shared_memory")
        publisher = run.publisher()
        workers = [run.worker(f"rollout-{i}", **options) for i in range(2)]
        for step in range(6):
            publisher.publish(v(step), model(step, big=True))
            for worker in workers:
                assert worker.next() == (v(step), as_bytes(model(step, big=True)))
            wait_served(publisher, v(step), 10, at_least=2)
        stats = publisher.stats()
        assert stats["buffers"] == 2
        assert {t["transport"] for t in stats["transfers"].values()} == {"shared_memory"}

    def test_a_worker_stopped_while_it_commits_never_sees_another_versions_bytes(
        self, run: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = ways(run, transport="shared_memory", commit_seconds=2)
        monkeypatch.setattr(transfers, "SILENT_SECONDS", 1.5)
        patient = {**options, "config": processes.config(transport="shared_memory")}
        publisher = run.publisher()
        stopped = run.worker("rollout-0", gate=True, late=True, **patient)
        other = run.worker("rollout-1", **options)
        publisher.publish(v(0), model(0, big=True))
        assert other.next()[0] == v(0)
        assert stopped.next() == "committing"
        stopped.signal(signal.SIGSTOP)
        run.lines.wait_for("rollout-0", "silent for")
        for step in range(1, 6):
            publisher.publish(v(step), model(step, big=True))
            assert other.next() == (v(step), as_bytes(model(step, big=True)))
        stopped.signal(signal.SIGCONT)
        stopped.pipe.send("go on")
        # It reads its version only now, whole, and is then served the newest one.
        assert stopped.next() == (v(0), as_bytes(model(0, big=True)))
        assert stopped.next() == "committing"
        stopped.pipe.send("go on")
        assert stopped.next() == (v(5), as_bytes(model(5, big=True)))

    def test_no_segment_outlives_learner_and_workers(self, run: Any) -> None:
        options = ways(run, transport="shared_memory")
        learner = run.learner(big=True)
        worker = run.worker(**options)
        learner.pipe.send((0, 1))
        assert worker.next()[0] == v(0)
        left = segments(learner.pid)
        assert left
        learner.kill()
        # The next learner of this user removes what the dead one left.
        publisher = run.publisher(term=run.new_term())
        assert not any(path.exists() for path in left)
        publisher.publish(v(0, term=2), model(2, big=True))
        assert worker.next() == (v(0, term=2), as_bytes(model(2, big=True)))
        own = segments(os.getpid())
        assert own
        publisher.close()
        assert not any(path.exists() for path in own)

    def test_auto_turns_to_the_next_transport_where_one_fails_twice(self, run: Any) -> None:
        options = ways(run, transport="auto")
        publisher = run.publisher()
        worker = run.worker(blind=True, **options)
        publisher.publish(v(0), model(0, big=True))
        assert worker.next() == (v(0), as_bytes(model(0, big=True)))
        assert publisher.stats()["failed"] == 2
        wait_served(publisher, v(0), 10)
        assert publisher.stats()["transfers"]["rollout-0"]["transport"] == "gloo"

    def test_no_room_for_it_ends_the_run_with_the_way_out(
        self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(staging, "SHARED_MEMORY", tmp_path / "none")
        ways(run, transport="shared_memory")
        with pytest.raises(WeightsError, match=r"shm-size\), or set weights\.transport=auto"):
            run.publisher().publish(v(0), model(0, big=True))
        # Any other way will do where none is set.
        ways(run, transport="auto")
        run.publisher(term=run.new_term()).publish(v(0, term=2), model(0, big=True))

    def test_a_worker_that_cannot_use_it_is_an_alarm_until_it_can(
        self, run: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = ways(run, transport="shared_memory")
        publisher = run.publisher()
        with monkeypatch.context() as patch:
            patch.setattr(transfers, "shared_memory_name", lambda: "of another host")
            worker = run.worker(**options)
            publisher.publish(v(0), model(0, big=True))
            run.lines.wait_for("rollout-0 can't be sent version 1.0: weights.transport=shared_mem")
            said = publisher.stats()["alarm"]
            assert said.startswith("rollout-0 can't be sent new weights: weights.transport=shared")
            assert "set weights.transport=auto" in said
        assert worker.next() == (v(0), as_bytes(model(0, big=True)))
        wait_served(publisher, v(0), 10)
        assert publisher.stats()["alarm"] == ""


class TestSnapshots:
    def test_a_worker_is_served_from_disk_and_the_newest_two_are_kept(
        self, run: Any, tmp_path: Path
    ) -> None:
        folder = tmp_path / "weights"
        options = ways(run, transport="snapshot", snapshot_folder=str(folder))
        publisher = run.publisher()
        worker = run.worker(**options)
        for step in range(4):
            publisher.publish(v(step), model(step, big=True))
            assert worker.next() == (v(step), as_bytes(model(step, big=True)))
        folder = folder / run.join.run_id
        assert sorted(path.name for path in folder.iterdir()) == ["1.2", "1.3", "LATEST"]
        assert (folder / "LATEST").read_text() == "1.3"
        saved = load_file(folder / "1.3" / "model.safetensors")
        assert as_bytes(list(saved.items())) == as_bytes(model(3, big=True))
        manifest = json.loads((folder / "1.3" / "manifest.json").read_text())
        assert manifest["version"] == {"term": 1, "step": 3}

    def test_what_another_run_has_left_in_the_folder_neither_serves_nor_hinders(
        self, run: Any, tmp_path: Path
    ) -> None:
        # Names of its own earlier versions, and of later ones than this run's.
        left = [tmp_path / name / "model.safetensors" for name in ("1.0", "2.7", "2.8")]
        for path in left:
            path.parent.mkdir()
            path.write_bytes(b"theirs")
        options = ways(run, transport="snapshot", snapshot_folder=str(tmp_path))
        publisher = run.publisher()
        worker = run.worker(**options)
        for step in range(2):
            publisher.publish(v(step), model(step, big=True))
            assert worker.next() == (v(step), as_bytes(model(step, big=True)))
        assert [path.read_bytes() for path in left] == [b"theirs"] * 3

    def test_one_byte_of_a_snapshot_that_changed_is_noticed_and_it_is_written_anew(
        self, run: Any, tmp_path: Path
    ) -> None:
        folder = tmp_path / "weights"
        options = ways(run, transport="snapshot", snapshot_folder=str(folder), snapshot_every=1)
        publisher = run.publisher()
        publisher.publish(v(0), model(0, big=True))
        path = folder / run.join.run_id / "1.0" / "model.safetensors"
        end = time.monotonic() + 20
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        worker = run.worker(**options)
        run.lines.wait_for("rollout-0 refused at verify", "was damaged")
        assert worker.next() == (v(0), as_bytes(model(0, big=True)))

    def test_one_that_is_lost_is_written_anew(self, run: Any, tmp_path: Path) -> None:
        options = ways(run, transport="snapshot", snapshot_folder=str(tmp_path))
        publisher = run.publisher()
        publisher.publish(v(0), model(0, big=True))
        assert run.worker(**options).next()[0] == v(0)
        shutil.rmtree(tmp_path / run.join.run_id)
        other = run.worker("rollout-1", **options)
        assert other.next() == (v(0), as_bytes(model(0, big=True)))

    def test_a_worker_that_can_not_read_them_is_an_alarm_until_it_can(
        self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = ways(run, transport="snapshot", snapshot_folder=str(tmp_path))
        publisher = run.publisher()
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "write", lambda *_: None)
            worker = run.worker(**options)
            publisher.publish(v(0), model(0, big=True))
            end = time.monotonic() + 20
            while not (alarm := publisher.stats()["alarm"]):
                assert time.monotonic() < end
                time.sleep(0.01)
            assert f"the snapshot {tmp_path / run.join.run_id / '1.0'} can't be read here" in alarm
            assert "weights.snapshot_folder" in alarm
        publisher.publish(v(1), model(1, big=True))
        assert worker.next() == (v(1), as_bytes(model(1, big=True)))
        wait_served(publisher, v(1), 10)
        assert publisher.stats()["alarm"] == ""

    def test_a_full_disk_costs_the_snapshot_and_is_named(self, run: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        folder = tmp_path / "file" / "weights"
        options = ways(run, transport="snapshot", snapshot_folder=str(folder))
        publisher = run.publisher()
        run.worker(**options)
        publisher.publish(v(0), model(0))
        run.lines.wait_for("no snapshot of version 1.0", "weights.snapshot_folder")

    def test_one_that_could_not_be_written_is_tried_again(self, run: Any, tmp_path: Path) -> None:
        in_the_way = tmp_path / "file"
        in_the_way.write_text("in the way")
        ways(run, snapshot_folder=str(in_the_way / "weights"), snapshot_every=100)
        publisher = run.publisher()
        publisher.publish(v(0), model(0, big=True))
        run.lines.wait_for("no snapshot of version 1.0")
        in_the_way.unlink()
        end = time.monotonic() + 20
        while publisher.stats()["snapshots"] < 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert (in_the_way / "weights" / run.join.run_id / "LATEST").read_text() == "1.0"

    def test_slow_workers_that_read_them_keep_them_and_hold_no_buffers(
        self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The slow ones say nothing while another starts.
        monkeypatch.setattr(transfers, "SILENT_SECONDS", 60.0)
        options = ways(run, transport="snapshot", snapshot_folder=str(tmp_path))
        publisher = run.publisher()
        with contextlib.ExitStack() as stack:
            reading: list[tuple[RawWorker, Offer]] = []
            for step in range(2):
                publisher.publish(v(step), model(step, big=True))
                slow = stack.enter_context(contextlib.closing(RawWorker(run, f"slow-{step}")))
                slow.ask()
                offer = slow.heard(20)
                while isinstance(offer, Offer) and offer.manifest.version != v(step):
                    # The snapshot before, while its own is being written.
                    slow.ask(offer.round)
                    offer = slow.heard(20)
                assert isinstance(offer, Offer)
                slow.ask(offer.round, busy=True)
                reading.append((slow, offer))
            worker = run.worker(**options)
            assert worker.next()[0] == v(1)
            for step in range(2, 5):
                for slow, offer in reading:
                    slow.ask(offer.round, busy=True)
                publisher.publish(v(step), model(step, big=True))
                assert worker.next() == (v(step), as_bytes(model(step, big=True)))
            assert publisher.stats()["buffers"] == 2
            # The newest two, and those that are being read.
            folder = tmp_path / run.join.run_id
            assert sorted(path.name for path in folder.glob("1.*")) == ["1.0", "1.1", "1.3", "1.4"]

    def test_they_are_written_as_often_as_asked(self, run: Any, tmp_path: Path) -> None:
        folder = tmp_path / "weights"
        options = ways(run, snapshot_folder=str(folder), snapshot_every=2)
        folder = folder / run.join.run_id
        publisher = run.publisher()
        worker = run.worker(**options)
        for step in range(5):
            publisher.publish(v(step), model(step, big=True))
            # None is overtaken by the next one before it could be written.
            assert worker.next() == (v(step), as_bytes(model(step, big=True)))
            end = time.monotonic() + 20
            while step % 2 == 0 and not (folder / f"1.{step}").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
        end = time.monotonic() + 20
        while publisher.stats()["snapshots"] < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert publisher.stats()["snapshots"] == 3
        assert sorted(path.name for path in folder.glob("1.*")) == ["1.2", "1.4"]


class TestBroadcast:
    def test_one_channel_serves_all_workers(self, run: Any) -> None:
        options = ways(run, topology="broadcast")
        publisher = run.publisher()
        workers = [run.worker(f"rollout-{i}", **options) for i in range(3)]
        for i in range(3):
            run.lines.wait_for(f"rollout-{i} joined")
        for step in range(3):
            publisher.publish(v(step), model(step, big=True))
            for worker in workers:
                assert worker.next() == (v(step), as_bytes(model(step, big=True)))
            wait_served(publisher, v(step), 20, at_least=3)
        stats = publisher.stats()
        # Each version went out once, to all.
        assert (stats["broadcasts"], stats["committed"], stats["failed"]) == (3, 9, 0)

    def test_a_joiner_is_served_and_then_takes_part(self, run: Any) -> None:
        options = ways(run, topology="broadcast")
        publisher = run.publisher()
        first = [run.worker(f"rollout-{i}", **options) for i in range(2)]
        publisher.publish(v(0), model(0, big=True))
        for worker in first:
            assert worker.next()[0] == v(0)
        joiner = run.worker("rollout-2", **options)
        assert joiner.next() == (v(0), as_bytes(model(0, big=True)))
        wait_served(publisher, v(0), 20, at_least=3)
        publisher.publish(v(1), model(1, big=True))
        for worker in (*first, joiner):
            assert worker.next() == (v(1), as_bytes(model(1, big=True)))

    def test_one_that_dies_in_mid_bucket_costs_a_round_and_the_others_go_on(self, run: Any) -> None:
        options = ways(run, topology="broadcast")
        publisher = run.publisher()
        dying = run.worker("rollout-0", half=True, **options)
        others = [run.worker(f"rollout-{i}", **options) for i in (1, 2)]
        for i in range(3):
            run.lines.wait_for(f"rollout-{i} joined")
        publisher.publish(v(0), model(0, big=True))
        assert dying.next() == "half"
        dying.kill()
        publisher.publish(v(1), model(1, big=True))
        for worker in others:
            newest = worker.next()
            while newest[0] != v(1):
                newest = worker.next()
            assert newest[1] == as_bytes(model(1, big=True))
