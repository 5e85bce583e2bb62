"""The connection: what is waited for, what is an error, and that a repeat changes nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from msgspec.structs import replace

from tandem.common.errors import StoreError
from tandem.replay import connection
from tandem.replay.connection import Store, connect, script_names, script_source
from tandem.replay.store import RunStore


def test_a_wrong_password_is_told_at_once_and_not_shown(server: Any):
    join = replace(server.join(), password="not-the-password")
    with pytest.raises(StoreError, match=f"127.0.0.1:{server.port} refused the password") as error:
        connect(join, deadline=60)
    assert "not-the-password" not in str(error.value)


def test_no_password_is_told_at_once(server: Any):
    with pytest.raises(StoreError, match="refused the password"):
        connect(replace(server.join(), password=None), deadline=60)


def test_a_server_that_never_comes_up_ends_in_an_error_with_its_address(own_server: Any):
    own_server.stop()
    with pytest.raises(StoreError, match=f"127.0.0.1:{own_server.port} didn't answer"):
        connect(own_server.join(), deadline=0.2)


def test_connecting_waits_for_a_server_that_comes_up(own_server: Any):
    own_server.kill()
    starter = threading.Thread(target=own_server.start)
    starter.start()
    store = connect(own_server.join(), deadline=20)
    starter.join()
    assert store.redis.ping()
    store.close()


def test_a_server_that_would_evict_keys_is_refused(own_server: Any):
    admin = connect(own_server.join())
    admin.redis.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match="maxmemory-policy=allkeys-lru"):
        connect(own_server.join())
    admin.close()


def test_neither_store_nor_join_info_show_the_password(server: Any):
    join = server.join()
    store = connect(join)
    assert server.password not in repr(store)
    assert server.password not in repr(join)
    store.close()


def test_every_script_states_what_must_hold_before_and_what_holds_after():
    for name in script_names():
        body = script_source(name).split(f"-- {name}:")
        assert len(body) == 2, f"{name}.lua doesn't begin by saying what it is"


def test_every_script_compiles(store: Store):
    for name in script_names():
        store.redis.script_load(script_source(name))


def test_scripts_come_back_after_they_were_flushed(store: Store):
    store.script("append", "things", "one", 10)
    store.redis.script_flush()
    store.script("append", "things", "two", 10)
    assert store.redis.lrange(store.key("things"), 0, -1) == [b"one", b"two"]


def test_a_batch_comes_back_after_scripts_were_flushed(store: Store):
    store.redis.script_flush()
    commands = [store.command("append", "things", f"{i}", 10) for i in range(3)]
    assert store.batch(commands) == [1, 1, 1]
    assert store.redis.lrange(store.key("things"), 0, -1) == [b"0", b"1", b"2"]


def test_a_repeated_request_gets_its_first_answer_and_acts_once(store: Store):
    command = store.command("append", "things", "one", 10)
    for _ in range(3):
        assert store.redis.execute_command(*command) == 1
    assert store.redis.lrange(store.key("things"), 0, -1) == [b"one"]


def test_the_answers_kept_for_repeats_stay_few_though_many_calls_keep_none(store: Store):
    for number in range(1000):
        store.script("append", "things", f"{number}", 10_000)
        store.script("beat", "rollout-0", "{}")
        store.script("beat", "rollout-0", "{}")
    # None of them was taken for a repeat of an earlier one.
    assert store.redis.llen(store.key("things")) == 1000
    kept = [store.redis.hlen(name) for name in store.redis.keys(store.key("answers:*"))]
    assert 0 < max(kept) <= 64


def test_threads_count_their_requests_apart(store: Store):
    callers: list[str] = []
    threads = [
        threading.Thread(target=lambda: callers.append(store.command("waiting")[4]))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(callers)) == 3


def test_two_connections_of_one_process_are_two_callers(server: Any):
    join = server.join()
    one, two = connect(join), connect(join)
    assert one.command("waiting")[4] != two.command("waiting")[4]
    one.close()
    two.close()


def test_a_call_goes_on_after_the_server_was_killed_and_started_again(own_server: Any):
    store = connect(own_server.join())
    store.script("append", "things", "before", 10)
    own_server.kill()
    starter = threading.Timer(0.1, own_server.start)
    starter.start()
    store.script("append", "things", "after", 10, deadline=20)
    starter.join()
    assert store.redis.lrange(store.key("things"), 0, -1) == [b"before", b"after"]
    store.close()


def test_a_call_gives_up_at_its_deadline_and_says_how_to_go_on(own_server: Any):
    store = connect(own_server.join())
    own_server.kill()
    with pytest.raises(StoreError, match="tandem start"):
        store.script("append", "things", "x", 10, deadline=0.2)
    store.close()


def test_a_server_that_hangs_holds_nobody_much_longer_than_a_short_deadline(own_server: Any):
    store = connect(own_server.join())
    runs = RunStore(store)
    assert runs.state(0.5) == "running"
    waits = [
        lambda: runs.state(0.5),
        lambda: store.script("append", "things", "x", 10, deadline=0.5),
        lambda: store.batch([("PING",)], deadline=0.5),
    ]
    os.kill(own_server.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for wait in waits:
            with pytest.raises(StoreError, match=r"didn't answer .*Timeout"):
                wait()
        # A command without a short deadline waits for half a minute before it asks anew.
        assert time.monotonic() - began < connection.SOCKET_TIMEOUT
    finally:
        os.kill(own_server.process.pid, signal.SIGCONT)
    store.script("append", "things", "x", 10, deadline=0.5)
    store.close()


def test_the_client_library_does_not_try_again_by_itself(store: Store):
    # Only Store.script repeats calls, with their request number.
    hung_up: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:
                    return
                hung_up.append(1)
                caller.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        store.redis.connection_pool.connection_kwargs["port"] = listener.getsockname()[1]
        store.redis.connection_pool.disconnect()
        store.redis.connection_pool.reset()
        with pytest.raises(redis.ConnectionError):
            store.redis.ping()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert hung_up == [1]


def test_keys_carry_the_run(store: Store):
    assert store.key("meta") == f"tandem:{store.run_id}:meta"


def send_hint(store: Store, channel: str) -> None:
    store.redis.publish(store.key(f"hint:{channel}"), b"")


def test_a_hint_wakes_a_waiter(store: Store):
    hints = store.hints("graded", "state")
    hints.wait(0.01)
    sender = threading.Timer(0.05, send_hint, [store, "state"])
    sender.start()
    assert hints.wait(10) == "state"
    sender.join()
    hints.close()


def test_many_hints_of_one_channel_wake_once(store: Store):
    hints = store.hints("graded", "taken")
    hints.wait(0.01)
    for channel in ("graded", "graded", "taken", "graded"):
        send_hint(store, channel)
    time.sleep(0.3)  # A message that is still on its way would wake once more.
    woken = {hints.wait(10), hints.wait(10)}
    assert woken == {"graded", "taken"}
    assert hints.wait(0.02) is None
    hints.close()


def test_a_waiter_without_a_hint_comes_back(store: Store):
    hints = store.hints("graded")
    assert hints.wait(0.05) is None
    hints.close()


def test_hints_come_again_after_the_server_was_restarted(own_server: Any):
    store = connect(own_server.join())
    hints = store.hints("taken")
    assert hints.wait(0.01) is None
    own_server.kill()
    assert hints.wait(0.05) is None
    own_server.start()
    for _ in range(200):
        send_hint(store, "taken")
        if hints.wait(0.05) == "taken":
            break
    else:
        pytest.fail("no hint came after the restart")
    hints.close()
    store.close()


def append_by_script(store: Store) -> None:
    store.script("append", "things", "x", 10)


def append_by_call(store: Store) -> None:
    store.call("rpush", store.key("things"), "x")


def append_by_batch(store: Store) -> None:
    assert store.batch([store.command("append", "things", "x", 10)]) == [1]


APPEND = [append_by_script, append_by_call, append_by_batch]


@contextmanager
def busy(server: Any) -> Iterator[Callable[[], None]]:
    """Another application's script keeps the server busy, until the function that this gives is called."""
    admin, other = server.client(), server.client()
    admin.config_set("lua-time-limit", 20)

    def run() -> None:
        with pytest.raises(redis.ResponseError):
            other.eval("while true do redis.call('ping') end", 0)

    def end() -> None:
        admin.script_kill()
        thread.join(10)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(2000):
            try:
                admin.ping()
            except redis.ResponseError:
                break
            time.sleep(0.01)
        yield end
    finally:
        if thread.is_alive():
            end()
        admin.close()
        other.close()


@pytest.mark.parametrize("append", APPEND)
def test_a_server_that_is_busy_with_a_script_of_others_is_waited_for(
    own_server: Any, append: Callable[[Store], None]
) -> None:
    store = connect(own_server.join())
    with busy(own_server) as end:
        with pytest.raises(StoreError, match=r"didn't answer .*BUSY"):
            store.script("append", "things", "x", 10, deadline=0.2)
        ender = threading.Timer(0.2, end)
        ender.start()
        append(store)
        ender.join()
    assert store.redis.lrange(store.key("things"), 0, -1) == [b"x"]
    store.close()


def test_connecting_waits_for_a_server_that_is_busy_with_a_script_of_others(
    own_server: Any,
) -> None:
    with busy(own_server) as end:
        ender = threading.Timer(0.2, end)
        ender.start()
        connect(own_server.join(), name="test").close()
        ender.join()


@pytest.mark.parametrize("append", APPEND)
def test_a_server_that_fails_over_is_waited_for(
    own_server: Any, append: Callable[[Store], None]
) -> None:
    store = connect(own_server.join())
    append(store)
    with socket.create_server(("127.0.0.1", 0)) as master:
        store.redis.replicaof("127.0.0.1", master.getsockname()[1])
        ender = threading.Timer(0.2, own_server.client().replicaof, ["NO", "ONE"])
        ender.start()
        append(store)
        ender.join()
    store.close()
