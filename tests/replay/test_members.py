"""The registry: who lives, and what each says of itself."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tandem.replay.connection import Store, connect
from tandem.replay.hosts import HEAD, HostLink, HostState
from tandem.replay.members import Members
from tandem.replay.store import RunStore


@pytest.fixture
def members(store: Store) -> Members:
    return Members(store)


def silence(store: Store, member: str, seconds: float) -> None:
    """Makes the last heartbeat of a member older."""
    store.redis.zincrby(store.key("beats"), -1000 * seconds, member)


def test_a_registered_member_is_found_by_its_role(members: Members):
    members.register("reward", "reward-0", {"endpoint": "tcp://127.0.0.1:1", "tags": []})
    members.register("rollout", "rollout-0", {"version": None})
    (found,) = members.live("reward")
    assert (found.member, found.role) == ("reward-0", "reward")
    assert found.info == {"endpoint": "tcp://127.0.0.1:1", "tags": []}
    assert 0 <= found.age < 10
    assert [m.member for m in members.live()] == ["reward-0", "rollout-0"]


def test_a_heartbeat_brings_what_changed(members: Members):
    members.register("rollout", "rollout-0", {"pid": 1, "version": None})
    members.beat("rollout-0", {"version": [1, 5]})
    assert members.live("rollout")[0].info == {"pid": 1, "version": [1, 5]}


def test_a_silent_member_is_not_live_until_it_is_heard_again(members: Members, store: Store):
    members.register("rollout", "rollout-0", {})
    silence(store, "rollout-0", 30)
    assert members.live("rollout") == []
    assert members.live("rollout", within=60)[0].age >= 30
    members.beat("rollout-0")
    assert len(members.live("rollout")) == 1


def test_a_member_that_left_is_gone(members: Members):
    members.register("rollout", "rollout-0", {})
    members.leave("rollout-0")
    assert members.live() == []


def test_a_later_life_replaces_the_earlier_one(members: Members, store: Store):
    members.register("rollout", "rollout-0", {"pid": 1, "old": True})
    Members(store).register("rollout", "rollout-0", {"pid": 2})
    assert members.live()[0].info == {"pid": 2}


def test_members_unheard_of_for_an_hour_are_forgotten(members: Members, store: Store):
    members.register("rollout", "rollout-0", {})
    silence(store, "rollout-0", 4000)
    members.register("rollout", "rollout-1", {})
    assert store.redis.hkeys(store.key("members")) == [b"rollout-1"]


def test_the_report_of_a_member_outlives_it_by_an_hour(members: Members, store: Store):
    runs = RunStore(store)
    for name in ("rollout-0", "rollout-1", "rollout-2"):
        members.register("rollout", name, {})
        runs.report(name, {"tokens": 1})
    members.leave("rollout-0")
    members.leave("rollout-1")
    members.beat("rollout-2")
    assert set(runs.reports()) == {"rollout-0", "rollout-1", "rollout-2"}
    silence(store, "rollout-0", 4000)
    members.beat("rollout-2")
    assert set(runs.reports()) == {"rollout-1", "rollout-2"}
    assert [m.member for m in members.live()] == ["rollout-2"]


def test_a_beat_of_who_has_not_registered_is_an_error(members: Members):
    with pytest.raises(ValueError, match="rollout-9"):
        members.beat("rollout-9")


def test_a_damaged_entry_is_told_once_and_not_at_each_look(
    members: Members, store: Store, caplog: pytest.LogCaptureFixture
):
    members.register("rollout", "rollout-0", {})
    members.register("rollout", "rollout-1", {})
    store.redis.hset(store.key("members"), "rollout-0", b"damaged")
    for _ in range(5):
        assert [m.member for m in members.live()] == ["rollout-1"]
    assert caplog.text.count("in the registry") == 1


@pytest.mark.timeout(30)
def test_a_host_waits_only_briefly_to_leave_a_redis_that_has_just_ended(own_server: Any) -> None:
    store = connect(own_server.join())
    state = HostState(host="a", address="127.0.0.1", pid=1, role=HEAD, processes=1)
    link = HostLink(store, "a-0", state)
    link.start()
    end = time.monotonic() + 20.0
    while link.look is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    own_server.kill()
    link.stop(leave=True)
    store.close()
