"""The head's meetings with other hosts, on a real Redis: both sides, without the processes that they decide about."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.common.config import Config
from tandem.common.errors import ConfigError
from tandem.launch.run.joining import Attendance, gpus_of
from tandem.launch.run.processes import meeting
from tandem.launch.run.processes.meeting import Convener, HostsMissing
from tandem.launch.run.processes.parts import ProcessSpec
from tandem.launch.run.processes.supervision import PartFailed
from tandem.replay import hosts
from tandem.replay.connection import connect
from tandem.replay.hosts import HEAD, Host, HostLink, HostState

RANK = ProcessSpec(name="learner-1", arguments=(), log=Path("learner-1.log"))


def config(**launch: float) -> Config:
    return Config.model_validate(
        {
            "run": {"steps": 1},
            "data": {"train": [{"path": "x.jsonl", "name": "x"}]},
            "learner": {"ranks": 4, "hosts": 2},
            "launch": launch,
        }
    )


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
    return found


class Meetings:
    """A head and other hosts of one run, which are told nothing but through Redis."""

    def __init__(self, server: Any, **launch: float) -> None:
        join = server.join()
        self._stores: list[Any] = []
        self._links: list[HostLink] = []
        self._join = join
        self.said: list[str] = []
        self.convener = Convener(config(**launch), "127.0.0.1", self.said.append)
        self.convener.begin(self.link("head", HEAD))

    def link(self, name: str, role: str = "learner", processes: int = 2) -> HostLink:
        """A host's thread."""
        store = connect(self._join)
        self._stores.append(store)
        state = HostState(
            host=name, address="127.0.0.1", pid=os.getpid(), role=role, processes=processes
        )
        link = HostLink(store, f"{name}-{len(self._links)}", state)
        self._links.append(link)
        link.start()
        return link

    def close(self) -> None:
        for link in self._links:
            link.stop(leave=False)
        for store in self._stores:
            store.close()


@pytest.fixture
def meet(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Meetings]]:
    for module in (hosts, meeting):
        monkeypatch.setattr(module, "EVERY_SECONDS", 0.05)
    monkeypatch.setattr(hosts, "TOLERATED_SECONDS", 0.25)
    monkeypatch.setattr(meeting, "PRESENT_SECONDS", 1.0)
    made: list[Meetings] = []

    def make(**launch: float) -> Meetings:
        made.append(Meetings(server, **launch))
        return made[-1]

    yield make
    for one in made:
        one.close()


def met(meetings: Meetings) -> tuple[Convener, Attendance, HostLink]:
    """A head and one other host, in a meeting."""
    link = meetings.link("b")
    attendance = Attendance(link)
    until(meetings.convener.may_start)
    until(attendance.may_start)
    assert attendance.meeting == meetings.convener.meeting
    return meetings.convener, attendance, link


def test_hosts_come_to_the_meeting_that_the_head_calls(meet: Callable[..., Meetings]) -> None:
    meetings = meet()
    # Neither a worker's host nor one with room for other than two ranks will do.
    meetings.link("a", "rollout")
    meetings.link("c", "learner", processes=1)
    until(lambda: meetings.convener.may_start() or meetings.said)
    assert meetings.said[0].startswith("the learner waits for 1 more host: there, `tandem join")
    convener, attendance, _ = met(meetings)
    assert attendance.place == 1
    assert convener.meeting is not None
    assert convener.meeting.ranks == 4
    assert convener.interruption() is attendance.interruption() is None
    assert not attendance.may_start()  # It has followed this one.


def test_a_rank_that_dies_elsewhere_ends_the_attempt_and_the_next_has_the_same_places(
    meet: Callable[..., Meetings], tmp_path: Path
) -> None:
    convener, attendance, _ = met(meet())
    log = tmp_path / "learner-1.log"
    log.write_text("the reason\n")
    assert not attendance.ended(ProcessSpec(name="learner-1", arguments=(), log=log), 7)
    found = until(convener.interruption)
    assert (found.exit, found.gently) == (7, False)
    assert "learner-1 on b ended with exit code 7" in found.why
    assert "the reason" in found.why
    before = convener.meeting
    assert before is not None
    until(convener.may_start)
    until(attendance.may_start)
    after = attendance.meeting
    assert after is not None
    assert (after.attempt, after.hosts) == (before.attempt + 1, before.hosts)


def test_a_rank_that_dies_on_the_head_ends_the_others(meet: Callable[..., Meetings]) -> None:
    convener, attendance, _ = met(meet())
    assert convener.ended(RANK, 1)
    found = until(attendance.interruption)
    assert found.exit is None


def test_a_reason_that_starting_again_cannot_mend_is_told_whoever_died_first(
    meet: Callable[..., Meetings],
) -> None:
    convener, attendance, _ = met(meet())
    attendance.ended(RANK, 2)
    assert convener.ended(RANK, 1)  # Its connection was gone.

    def starts() -> bool:
        with pytest.raises(PartFailed, match="configuration or data error: learner-1 on b"):
            until(convener.may_start)
        return True

    assert starts()


def test_a_host_that_went_down_with_an_attempt_is_not_called_to_the_next_one(
    meet: Callable[..., Meetings],
) -> None:
    meetings = meet()
    convener, _, link = met(meetings)
    link.stop(leave=False)
    assert convener.ended(RANK, 1)
    waits = "the learner waits for host b"
    until(lambda: convener.may_start() or waits in "".join(meetings.said))
    assert waits in "".join(meetings.said)


def test_a_host_that_leaves_has_the_learner_checkpoint_once(
    meet: Callable[..., Meetings],
) -> None:
    convener, _, link = met(meet())
    link.say(leaving=True)
    found = until(convener.interruption)
    assert found.gently
    assert convener.interruption() is None
    assert not convener.ended(RANK, 0)  # That wasn't a death.
    assert not convener.may_start()


def test_a_host_that_stays_away_is_named_at_half_of_the_deadline_and_at_its_end(
    meet: Callable[..., Meetings],
) -> None:
    meetings = meet(lost_seconds=0.5, hosts_seconds=1)
    convener, _, link = met(meetings)
    link.stop(leave=False)
    found = until(convener.interruption)
    assert "host b (127.0.0.1, last seen" in found.why
    with pytest.raises(
        HostsMissing, match=r"host b .*didn't come to the learner's meeting"
    ) as told:
        until(convener.may_start)
    assert told.value.exit_code == 75
    assert any(line.startswith("waiting for host b (127.0.0.1, last") for line in meetings.said)


def test_a_spare_takes_the_place_of_a_host_that_has_left(meet: Callable[..., Meetings]) -> None:
    meetings = meet()
    convener, _, link = met(meetings)
    spare = Attendance(meetings.link("spare"))
    link.stop(leave=True)
    assert "has left" in until(convener.interruption).why
    until(convener.may_start)
    until(spare.may_start)
    assert spare.place == 1


def test_after_a_jump_of_redis_clock_a_host_is_lost_only_if_it_stays_silent(
    meet: Callable[..., Meetings],
) -> None:
    meetings = meet()
    watcher, other = meetings.link("a"), meetings.link("b")
    until(lambda: watcher.look is not None and watcher.look.host(other.member))
    other.stop(leave=False)
    watcher._since -= 100  # It has watched for longer than a host may be silent.

    def aged() -> Host | None:
        found = watcher.look.host(other.member) if watcher.look is not None else None
        return found if found is not None and found.age > 100 else None

    # Seen from Redis' clock after a jump, every earlier heartbeat is older.
    store = other.hosts._store
    store.call("zincrby", store.key("beats"), -100_000, other.member)
    host = until(aged)
    assert not watcher.is_lost(host, 60)
    watcher._since -= 100
    assert watcher.is_lost(host, 60)


def test_what_a_host_brings_is_what_the_run_needs() -> None:
    settings = config()
    assert gpus_of(settings, "learner", None) == [(), ()]
    assert gpus_of(settings, "reward", 3) == [()] * 3
    with pytest.raises(ConfigError, match=r"--workers 3: each of learner.hosts=2 has 2"):
        gpus_of(settings, "learner", 3)
    with pytest.raises(ConfigError, match=r"environments.use is empty"):
        gpus_of(settings, "environments", None)
    alone = settings.model_copy(
        update={"learner": settings.learner.model_copy(update={"hosts": 1})}
    )
    with pytest.raises(ConfigError, match=r"learner.hosts=1"):
        gpus_of(alone, "learner", None)
