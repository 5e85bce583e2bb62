"""The ACL rule of docs/redis.md suffices and has nothing to spare; what a server lacks is told before a start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_servers import USER, allow, in_python, in_scripts, joined

from tandem.common.errors import HeldError, StoreError
from tandem.common.records import Problem
from tandem.common.run_folder import JoinInfo
from tandem.launch.host import existing_redis, redis_server
from tandem.replay.access import COMMANDS, Denied, denied, rule
from tandem.replay.connection import connect
from tandem.replay.ledger import Ledger
from tandem.replay.members import Members
from tandem.replay.store import RunStore

ROOT = Path(__file__).resolve().parents[2]


def check(join: JoinInfo, durability: str = "process", **state: bool) -> existing_redis.Server:
    return existing_redis.check(join, durability, **{"new": True, "filled": False, **state})


def refusal(join: JoinInfo, durability: str = "process", **state: bool) -> str:
    with pytest.raises(StoreError) as told:
        check(join, durability, **state)
    return str(told.value)


@pytest.fixture
def set_to(any_server: Any) -> Iterator[Callable[..., None]]:
    """Changes settings of the server, as its owner."""
    client = any_server.client()
    before: dict[str, str] = {}

    def change(**settings: str) -> None:
        for name, value in settings.items():
            name = name.replace("_", "-")
            before.setdefault(name, next(iter(client.config_get(name).values())))
            client.config_set(name, value)

    yield change
    for name, value in before.items():
        client.config_set(name, value)
    client.close()


def test_the_documented_rule_is_the_one_that_is_tested() -> None:
    assert rule() in " ".join((ROOT / "docs/redis.md").read_text().split())


def test_the_rule_has_every_command_of_every_script() -> None:
    assert len(in_scripts()) > 20
    assert in_scripts() <= COMMANDS.keys()


def test_the_rule_has_every_command_that_the_rooms_send_themselves() -> None:
    assert len(in_python()) > 20
    assert in_python() <= COMMANDS.keys()


def test_the_rule_suffices_and_what_it_forbids_is_told(any_server: Any) -> None:
    join = joined(any_server, db=3, password=allow(any_server))
    server = check(join)
    assert len(server.notes) == 1
    assert "doesn't let this user ask for appendfsync (CONFIG GET)" in server.notes[0]
    client = any_server.client(db=3)
    assert client.keys() == []
    if tuple(map(int, server.version.split(".")[:2])) > redis_server.OLDEST:
        # CONFIG GET is the one thing that was asked for and not permitted.
        assert {entry["object"] for entry in client.acl_log()} <= {"config|get"}
    client.close()


def test_the_rule_suffices_for_what_a_run_asks_for_now_and_then(any_server: Any) -> None:
    store = connect(joined(any_server, password=allow(any_server)), name="test")
    assert Ledger(store, "learner-0").quarantined_steps() == 0
    problem = Problem(
        problem_id="two/0", prompt_text="1+1=", prompt_tokens=np.arange(4, dtype=np.int32), gold="2",
        data_source="two", ability="math", trace_ids=(), extra={},
    )  # fmt: skip
    run = RunStore(store)
    run.put_eval_set("job:two", [problem])
    assert [one.problem_id for one in run.eval_set("job:two")] == ["two/0"]
    run.forget_set("job:two")
    client = any_server.client()
    assert client.keys(store.key("eval*")) == []
    client.close()
    store.close()


def test_each_command_that_is_not_permitted_is_named(any_server: Any) -> None:
    for command in COMMANDS:
        missing = rule().replace(f" +{command} ", " ") if command != max(COMMANDS) else ""
        missing = missing or rule().removesuffix(f" +{command}")
        join = joined(any_server, db=1, password=allow(any_server, missing))
        told = refusal(join)
        # Of a connection that can't even be made the server itself names the command.
        named = {command, f"'{command}'", f"'{command.partition('|')[0]}'"}
        assert named & set(re.findall(r"[^ ,;)]+", told)), told
        assert "ACL" in told, told


def test_keys_and_channels_that_are_not_permitted_are_named(any_server: Any) -> None:
    others = rule("theirs:*")
    told = refusal(joined(any_server, password=allow(any_server, others)))
    assert "keys tandem:*; channels tandem:*" in told
    assert f"ACL SETUSER {USER} ~tandem:* &tandem:*`" in told
    no_channels = rule().replace("&tandem:*", "")
    told = refusal(joined(any_server, password=allow(any_server, no_channels)))
    assert f"(channels tandem:*): give it `ACL SETUSER {USER} &tandem:*`" in told


def test_a_rule_for_one_run_alone_suffices_as_well(any_server: Any) -> None:
    join = joined(any_server)
    password = allow(any_server, rule(f"tandem:{join.run_id}:*"))
    check(joined(any_server, run_id=join.run_id, password=password))


def test_what_is_asked_of_the_acl_leaves_nothing_behind(any_server: Any) -> None:
    store = connect(any_server.join(), name="test")
    assert denied(store) == Denied()
    assert store.redis.keys(f"{store.key('')}*") == []
    store.close()


def test_what_a_process_is_not_permitted_later_on_is_told_with_the_way_out(any_server: Any) -> None:
    join = joined(any_server, password=allow(any_server))
    store = connect(join, name="test")
    RunStore(store).set_state("running")
    client = any_server.client()
    client.execute_command("ACL", "SETUSER", USER, "-hset", "-get")
    with pytest.raises(StoreError, match=r"doesn't permit .* docs/redis\.md"):
        RunStore(store).set_state("draining")
    with pytest.raises(StoreError, match=r"doesn't permit .* docs/redis\.md"):
        RunStore(store).config_yaml()
    client.close()
    store.close()


def test_the_documented_clean_up_deletes_a_runs_keys_and_no_others(any_server: Any) -> None:
    line = next(
        line for line in (ROOT / "docs/redis.md").read_text().splitlines() if "UNLINK" in line
    )
    join = any_server.join()
    store, client = connect(join, name="test"), any_server.client()
    for name in ("problem_rows:my data", "problem_rows:Bob's", 'eval:a "b"', "meta"):
        client.set(store.key(name), "ours")
    client.set("data", "theirs")
    cli = Path(sys.executable).with_name("redis-cli")
    words = {"$cli": f"{cli} -p {any_server.port}", "RUN": store.run_id}
    for name, value in words.items():
        line = line.replace(name, value)
    environment = {**os.environ, "REDISCLI_AUTH": join.password}
    subprocess.run(["bash", "-c", line], env=environment, check=False, timeout=60)
    assert client.keys(store.key("*")) == []
    assert client.getdel("data") == b"theirs"
    client.close()
    store.close()


def test_a_wrong_password_names_the_user_and_not_the_password(any_server: Any) -> None:
    allow(any_server)
    told = refusal(joined(any_server, password="a-wrong-one"))
    assert f"refused the password of user {USER}" in told
    assert "TANDEM_REDIS_PASSWORD" in told
    assert "a-wrong-one" not in told


def test_a_database_that_is_not_there(any_server: Any) -> None:
    assert "has no database 4711" in refusal(
        joined(any_server, db=4711, password=allow(any_server))
    )


def test_a_server_that_throws_keys_away_is_refused(any_server: Any, set_to: Any) -> None:
    set_to(maxmemory_policy="allkeys-lru")
    told = refusal(joined(any_server, password=allow(any_server)))
    assert "set `maxmemory-policy noeviction` there" in told


def test_a_server_that_keeps_nothing_is_refused_or_taken_as_it_is(
    any_server: Any, set_to: Any
) -> None:
    set_to(appendonly="no")
    join = joined(any_server, password=allow(any_server))
    for durability in ("process", "power"):
        assert "replay.durability=server" in refusal(join, durability)
    (note,) = check(join, "server").notes
    assert "has appendonly off" in note


def test_how_often_a_server_syncs_is_told_or_refused(any_server: Any, set_to: Any) -> None:
    join = joined(any_server, password=allow(any_server, f"{rule()} +config|get"))
    assert check(join).notes == ()
    assert "has appendfsync no, and replay.durability=power" in refusal(join, "power")
    set_to(appendfsync="everysec")
    for durability, wanted in (("process", "always` or `appendfsync no"), ("power", "always")):
        told = refusal(join, durability)
        assert "has appendfsync everysec" in told
        assert f"set `appendfsync {wanted}` there, or take it as it is" in told
    assert "its last second may be lost when it is killed" in check(join, "server").notes[0]
    set_to(appendfsync="always")
    assert check(join, "power").notes == ()
    unasked = joined(any_server, password=allow(any_server))
    assert "and permit +config|get" in refusal(unasked, "power")


def test_a_server_that_is_full_of_others_keys_is_told(any_server: Any, set_to: Any) -> None:
    client = any_server.client()
    # What other tests' connections held may be freed any moment: the share has to stand well clear of the bound.
    client.set("others", "x" * (8 << 20))
    set_to(maxmemory=str(client.info("memory")["used_memory"] * 10 // 9))
    join = joined(any_server, password=allow(any_server))
    try:
        assert any("of its maxmemory, others' keys included" in note for note in check(join).notes)
    finally:
        client.delete("others")
        client.close()


def test_a_replica_is_refused_and_names_the_other_one(any_server: Any) -> None:
    join = joined(any_server, password=allow(any_server))
    client = any_server.client()
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        assert "is a replica of 127.0.0.1:1" in refusal(join)
    finally:
        client.execute_command("REPLICAOF", "NO", "ONE")
        client.close()


def test_a_node_of_a_cluster_is_refused(servers: Any, tmp_path: Path) -> None:
    with servers.running(tmp_path, cluster_enabled="yes") as server:
        assert "is a node of a cluster" in refusal(server.join())


def test_a_server_that_is_too_old_is_refused(any_server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(redis_server, "OLDEST", (99, 0))
    assert "Tandem needs 6.2 or newer" in refusal(any_server.join())


def test_another_run_of_the_same_id_and_a_run_that_is_gone(any_server: Any) -> None:
    join = joined(any_server, password=allow(any_server))
    assert "holds no ledger of run" in refusal(join, new=False, filled=True)
    client = any_server.client()
    client.hset(f"tandem:{join.run_id}:meta", "created", "1")
    assert "holds another run of the id" in refusal(join)
    check(join, new=False, filled=True)
    client.delete(f"tandem:{join.run_id}:meta")
    client.close()


def test_a_copy_of_a_folder_whose_run_is_under_way_is_refused(
    any_server: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(existing_redis, "OTHERS_SECONDS", 0.8)
    monkeypatch.setattr(existing_redis, "ENDING_SECONDS", 0.0)
    join = joined(any_server, password=allow(any_server))
    store = connect(join, name="test")
    store.redis.hset(store.key("meta"), "created", "1")
    members = Members(store)
    members.register("rollout", "rollout-far-17", {})
    members.register("rollout", "rollout-0", {})
    # One that was killed is silent: it is waited out.
    check(join, new=False, filled=True)
    real = Members.live

    def beating(self: Members, *arguments: Any, **named: Any) -> Any:
        found = real(self, *arguments, **named)
        members.beat("rollout-0")
        return found

    members.beat("rollout-0")
    monkeypatch.setattr(Members, "live", beating)
    with pytest.raises(HeldError, match="is under way elsewhere: its rollout-0 is alive"):
        check(join, new=False, filled=True)
    store.close()
