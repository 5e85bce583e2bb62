"""Servers that die, leave, fill up or get nonsense, and workers that cancel or have the wrong key."""

from __future__ import annotations

import asyncio
import signal
import uuid
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from environment_runs import Playing, Run, connected, make_run, until

from tandem.common.records import Verdict
from tandem.common.sockets import CurveKeys, connect_dealer, new_keys
from tandem.replay.members import Member, Members
from tandem.replay.store import RunStore
from tandem.rollout.environments import client as environment_client
from tandem.rollout.environments import wire


@pytest.fixture
def own(server: Any, tmp_path: Path) -> Any:
    """A run whose servers the test may kill."""
    made = make_run(server, tmp_path, episodes=2, step_seconds=30.0, episode_seconds=40.0)
    yield made
    made.store.close()


def waiting(shared: Path) -> dict[str, Any]:
    """A row whose step waits until it is let go."""
    return {"what": "wait", "begun": str(shared / "begun"), "go": str(shared / "go")}


async def lines(path: Path, count: int) -> list[str]:
    """Waits until a file has that many lines."""
    async with asyncio.timeout(30):
        while not path.exists() or len(path.read_text().splitlines()) < count:
            await asyncio.sleep(0.02)
    return path.read_text().splitlines()


class Peer:
    """A raw DEALER to one server."""

    def __init__(self, member: Member, keys: CurveKeys | None) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = connect_dealer(
            self.context,
            member.info["endpoint"],
            identity=uuid.uuid4().hex,
            server_public=member.info["public_key"],
            client=keys,
        )

    def ask(self, *frames: bytes, seconds: float = 10.0) -> list[bytes] | None:
        """Sends frames; returns the next answer, None if there is none, or no connection."""
        if not self.socket.poll(int(seconds * 1000), zmq.POLLOUT):
            return None
        self.socket.send_multipart(frames)
        return self.socket.recv_multipart() if self.socket.poll(int(seconds * 1000)) else None

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def with_client(run: Run, endpoint: Any, count: int, body: Any, **settings: Any) -> Any:
    async def inside() -> Any:
        client = run.client(**settings)
        await client.start()
        try:
            await connected(client, count)
            return await body(Playing(endpoint, client))
        finally:
            await client.close()

    return asyncio.run(inside())


def test_the_episodes_of_a_killed_server_are_played_again_on_another(
    own: Run, endpoint: Any, shared: Path
) -> None:
    with own.server("environments-0") as one, own.server("environments-1") as other:
        until(lambda: len(own.members()) == 2, 90)

        async def body(playing: Playing) -> list[Any]:
            row = waiting(shared)
            both = [asyncio.create_task(playing.play("bad", row)) for _ in range(2)]
            await lines(shared / "begun", 2)
            # One at each: the client sends to the server with the most free places.
            pids = [int(line.split()[0]) for line in (shared / "begun").read_text().splitlines()]
            owners = {psutil.Process(pid).ppid(): pid for pid in pids}
            assert owners.keys() == {one.pid, other.pid}
            one.kill()
            await lines(shared / "begun", 3)
            (shared / "go").touch()
            found = await asyncio.gather(*both)
            assert playing.sessions == 3
            assert playing.client.lost == 1
            until(lambda: not psutil.pid_exists(owners[one.pid]))
            return found

        assert [one.reward for one in with_client(own, endpoint, 2, body)] == [1.0, 1.0]


def test_an_episode_whose_only_server_dies_fails_by_no_fault_of_the_policy(
    own: Run, endpoint: Any, shared: Path
) -> None:
    with own.server() as server:
        until(own.members, 90)

        async def body(playing: Playing) -> Any:
            task = asyncio.create_task(playing.play("bad", waiting(shared)))
            pid = int((await lines(shared / "begun", 1))[0].split()[0])
            server.kill()
            played = await task
            until(lambda: not psutil.pid_exists(pid))
            return played

        played = with_client(own, endpoint, 1, body, retries=0)
    assert (played.reward, played.failure) == (None, Verdict.ENV_FAILED)
    assert "was lost 1 times" in played.detail


@pytest.mark.byhand
def test_a_stopped_server_is_lost_too(own: Run, endpoint: Any, shared: Path) -> None:
    with own.server() as server:
        until(own.members, 90)

        async def body(playing: Playing) -> Any:
            task = asyncio.create_task(playing.play("bad", waiting(shared)))
            await lines(shared / "begun", 1)
            server.send_signal(signal.SIGSTOP)
            return await task

        played = with_client(own, endpoint, 1, body, retries=0)
    assert played.failure is Verdict.ENV_FAILED


def test_a_server_that_is_asked_to_end_plays_to_the_end_and_hands_back_the_rest(
    own: Run, endpoint: Any, shared: Path
) -> None:
    with own.server("environments-0") as one:
        until(own.members, 90)

        async def body(playing: Playing) -> Any:
            row = waiting(shared)
            tasks = [asyncio.create_task(playing.play("bad", row)) for _ in range(3)]
            await lines(shared / "begun", 2)
            one.terminate()
            # The third one had no place: it comes back, and finds no other server.
            done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            (shared / "go").touch()
            return next(iter(done)).result(), await asyncio.gather(*rest)

        back, played = with_client(own, endpoint, 1, body, retries=0)
        assert "leaving" in back.detail
        assert [one.reward for one in played] == [1.0, 1.0]
        until(lambda: one.poll() is not None)
        assert one.returncode == 0, own.log()
        assert not own.members()


def test_what_a_leaving_server_hands_back_goes_to_another_however_full_that_is(
    own: Run, endpoint: Any, shared: Path
) -> None:
    with own.server("environments-0") as one, own.server("environments-1"):
        until(lambda: len(own.members()) == 2, 90)

        async def body(playing: Playing) -> Any:
            tasks = [asyncio.create_task(playing.play("bad", waiting(shared))) for _ in range(8)]
            await lines(shared / "begun", 4)
            one.terminate()
            async with asyncio.timeout(30):
                while playing.client.lost < 2:
                    await asyncio.sleep(0.02)
            (shared / "go").touch()
            return await asyncio.gather(*tasks)

        played = with_client(own, endpoint, 2, body, retries=1)
    assert [(one.reward, one.detail) for one in played] == [(1.0, "done")] * 8


def test_a_cancelled_episode_is_ended_at_its_server(own: Run, endpoint: Any, shared: Path) -> None:
    with own.server() as server:
        until(own.members, 90)

        async def body(playing: Playing) -> None:
            task = asyncio.create_task(playing.play("bad", waiting(shared)))
            pid = int((await lines(shared / "begun", 1))[0].split()[0])
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            async with asyncio.timeout(20):
                while psutil.pid_exists(pid):
                    await asyncio.sleep(0.02)

        with_client(own, endpoint, 1, body)
        assert server.poll() is None


def test_a_run_past_the_clients_own_deadline_is_cancelled(
    own: Run, endpoint: Any, shared: Path
) -> None:
    with own.server():
        until(own.members, 90)

        async def body(playing: Playing) -> Any:
            task = asyncio.create_task(playing.play("bad", waiting(shared)))
            pid = int((await lines(shared / "begun", 1))[0].split()[0])
            played = await task
            async with asyncio.timeout(20):
                while psutil.pid_exists(pid):
                    await asyncio.sleep(0.02)
            return played

        played = with_client(own, endpoint, 1, body, deadline=2.0, grace=1.0)
    assert played.failure is Verdict.ENV_TIMEOUT
    assert "within 3 s" in played.detail


def test_a_server_that_redis_forgets_for_a_while_keeps_its_episodes(
    play: Any, shared: Path
) -> None:
    """As after an outage of Redis, until the servers have beaten once more."""

    async def body(playing: Playing) -> Any:
        client = playing.client
        task = asyncio.create_task(playing.play("bad", waiting(shared)))
        await lines(shared / "begun", 1)
        found, client._servers = client._servers, list
        async with asyncio.timeout(20):
            while client._links and next(iter(client._links.values())).absences < 2:
                await asyncio.sleep(0.02)
        # It gets no other episode until it is seen again.
        other = asyncio.create_task(playing.play("bad", {}))
        assert client.slots("bad") == 0
        client._servers = found
        assert (await other).reward == 1.0
        (shared / "go").touch()
        played = await task
        return played, client.lost

    played, lost = play(body)
    assert (played.reward, played.failure, lost) == (1.0, None, 0)


def test_no_server_is_lost_while_nobody_is_in_the_registry(
    play: Any, own: Run, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while Redis takes no heartbeats, since it can't write, but still answers."""
    monkeypatch.setattr(environment_client, "MOST_ABSENCES", 3)
    monkeypatch.setattr(environment_client, "LOOK_SECONDS", 0.02)
    nobody = Members(own.store)

    async def body(playing: Playing) -> Any:
        task = asyncio.create_task(playing.play("bad", waiting(shared)))
        await lines(shared / "begun", 1)
        looks = 0

        def silent() -> Any:
            nonlocal looks
            looks += 1
            # Its own heartbeat may be older than everybody else's.
            return [] if looks == 1 else environment_client.servers_in(nobody)

        playing.client._servers = silent
        async with asyncio.timeout(20):
            while looks < 8:
                await asyncio.sleep(0.02)
        assert playing.client.slots("bad") > 0
        (shared / "go").touch()
        return await task

    played = play(body, retries=0)
    assert (played.reward, played.failure) == (1.0, None)


def test_a_server_that_stays_out_of_the_registry_is_lost(
    play: Any, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_client, "MOST_ABSENCES", 3)

    async def body(playing: Playing) -> Any:
        task = asyncio.create_task(playing.play("bad", waiting(shared)))
        await lines(shared / "begun", 1)
        playing.client._servers = list
        return await task

    played = play(body, retries=0)
    assert played.failure is Verdict.ENV_FAILED
    assert "left the registry" in played.detail


def test_nobody_is_answered_without_the_runs_key(run: Run, running: Any) -> None:
    (member,) = run.members()
    for keys, answered in ((new_keys(), False), (RunStore(run.store).curve_client(), True)):
        peer = Peer(member, keys)
        try:
            answer = peer.ask(b"1", b"health", b"\x80", seconds=10.0 if answered else 1.5)
        finally:
            peer.close()
        assert (answer is not None) == answered


def test_nonsense_is_refused_and_the_server_goes_on(run: Run, running: Any) -> None:
    (member,) = run.members()
    peer = Peer(member, RunStore(run.store).curve_client())
    try:
        for frames in ((b"1", b"dance", b"\x80"), (b"1", b"run", b"\x80"), (b"1", b"run", b"\xc1")):
            answer = peer.ask(*frames)
            assert answer is not None
            name, kind, data = answer
            assert (name, kind) == (b"1", b"reply")
            assert wire.read_reply(data).success is False
        peer.socket.send_multipart([b"\xff", b"run", b""])  # It has no id to answer.
        answer = peer.ask(b"only one")
        assert answer is not None
        assert answer[0] == b"only one"
        answer = peer.ask(b"2", b"health", b"\x80")
        assert answer is not None
        assert wire.read_reply(answer[2]).success
        answer = peer.ask(b"3", b"cancel", msgspec.msgpack.encode({"request_id": "nothing"}))
        assert answer is not None
        assert (wire.read_reply(answer[2]).success, wire.read_reply(answer[2]).cancelled) == (
            True,
            False,
        )
    finally:
        peer.close()


def test_a_server_reports_what_it_has_played_and_ends_with_the_run(own: Run, endpoint: Any) -> None:
    with own.server() as server:
        until(own.members, 90)

        async def body(playing: Playing) -> None:
            await playing.play("bad", {})
            await playing.play("bad", {"what": "raise", "number": 1})

        with_client(own, endpoint, 1, body)
        store = RunStore(own.store)
        report = until(
            lambda: (
                (found := store.reports().get("environments-0"))
                and found.get("environments/failed/env_failed") == 1
                and found
            )
        )
        assert report["role"] == "environments"
        assert report["environments/played"] == 1
        assert report["environments/killed"] == 1
        store.set_state("finished")
        until(lambda: server.poll() is not None, 30)
        assert server.returncode == 0


def test_an_environment_that_cannot_be_imported_is_named_and_ends_the_server(
    server: Any, tmp_path: Path
) -> None:
    run = make_run(
        server, tmp_path, use={"lost": {"form": "text", "target": "nowhere.at_all:World"}}
    )
    with run.server() as process:
        until(lambda: process.poll() is not None, 60)
        assert process.returncode != 0
    assert (
        "environments.use.lost can't be loaded: ModuleNotFoundError: No module named 'nowhere'"
        in (run.log())
    )
    run.store.close()
