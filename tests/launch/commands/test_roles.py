"""A role that is started by hand: its threads, and that it ends with one that it can't do without; and what it loads."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tandem.common.config import to_yaml
from tandem.common.errors import StoreError
from tandem.common.run_folder import JoinInfo, RunFolder
from tandem.launch.commands import roles
from tandem.launch.commands.options import joined
from tandem.launch.plan import hardware
from tandem.launch.run.opened.presets import load
from tandem.replay.connection import connect
from tandem.replay.store import RunStore

PROGRAM = """
import json, sys, threading, time
from tandem.common import sockets
from tandem.common.telemetry import start_log
from tandem.launch.commands import roles
start_log("rollout")
threading.excepthook = roles._end_with_a_thread
target = {"ours": lambda: sockets.check_address("a", "nowhere", None), "other": lambda: json.loads("{")}
thread = threading.Thread(target=target[sys.argv[1]], name="finder")
thread.start()
thread.join()
print("goes on")
"""


@pytest.mark.parametrize(
    ("which", "code", "said"),
    [("ours", 1, "thread finder has failed, so the process ends"), ("other", 0, "goes on")],
)
def test_a_thread_that_fails_ends_the_process_if_it_is_ours(
    which: str, code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, which],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Error" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("role", "words", "threads"),
    [
        ("learner", ["replay.max_staleness=0"], 3),
        ("learner", [], 2),
        ("learner", ["learner.threads=5"], 5),
        ("rollout", ["rollout.threads=2"], 2),
        ("reward", [], 1),
    ],
)
def test_a_role_has_as_many_threads_as_if_the_launcher_had_started_it(
    role: str, words: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "usable_cores", lambda: 3)
    config = load("miniature").resolve(["launch.gpus=none", *words])
    assert roles._threads(role, config) == threads


def test_two_processes_with_one_host_name_and_process_id_are_two_members(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers that share their host's name."""
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    file = tmp_path / "join.json"
    file.write_bytes(json.dumps(structs.asdict(server.join())).encode())
    names: list[str] = []

    def told(join: JoinInfo, name: str) -> Any:
        names.append(name)
        return joined(join, name)

    monkeypatch.setattr(roles, "joined", told)
    for given in (None, None, "mine"):
        asked = argparse.Namespace(run=None, join=str(file), name=given)
        # There is nothing to join, which is found out under the member's name.
        with pytest.raises(StoreError, match="holds no config of run"):
            roles.run_role("rollout", asked)
    here = f"rollout-{socket.gethostname()}-{os.getpid()}"
    assert all(name.startswith(here) for name in names[:2])
    assert names[0] != names[1]
    assert names[2] == "mine"


def put(join: JoinInfo, folder: Path, *overrides: str) -> None:
    """A run that can be joined, in a Redis and by a file."""
    store = connect(join)
    RunStore(store).put_config(to_yaml(load("miniature").resolve(list(overrides))))
    store.close()
    RunFolder(folder).write_join(join)


DRAINS = """
import sys, types
from tandem.launch.cli import dispatch
from tandem.launch.commands import roles
def main(join, config, **more):
    print(config.launch.drain_seconds)
    return 0
sys.modules["stub"] = types.SimpleNamespace(main=main)
roles.ENTRY = dict.fromkeys(roles.ENTRY, "stub")
dispatch(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["rollout", "--drain", "600"], "600.0"),
        (["environments", "--drain", "7.5"], "7.5"),
        (["reward", "--drain", "20"], "20.0"),
        (["reward"], "60.0"),
    ],
)
def test_a_role_drains_for_as_long_as_its_host_has(
    server: Any, tmp_path: Path, words: list[str], seconds: str
) -> None:
    join = server.join()
    put(join, tmp_path)
    named = [*words, "--join", str(tmp_path / "join.json")]
    done = subprocess.run(
        [sys.executable, "-c", DRAINS, *named],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{seconds}\n"), done.stderr


@pytest.mark.parametrize("role", ["reward", "environments"])
def test_with_an_existing_redis_a_process_listens_where_the_head_finds_it(
    server: Any, tmp_path: Path, role: str
) -> None:
    """Not where that Redis does, which may be behind a tunnel."""
    join = server.join()
    put(
        join,
        tmp_path,
        f"replay.redis_url=redis://{join.host}:{join.port}",
        "launch.bind=nowhere.invalid",
        'environments.use={even: {form: text, target: "even_world:Even"}}',
        "environments.default=even",
        "expert.per_group=0",
    )
    done = subprocess.run(
        [sys.executable, "-m", "tandem.launch", role, "--join", str(tmp_path / "join.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no address of this host reaches nowhere.invalid" in done.stderr


LOADS = """
import gc, sys
from tandem.launch.commands import roles
roles.load_alone("rollout")
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
sys.exit("the role ends")
"""


def test_what_a_role_has_loaded_is_no_garbage_until_it_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    # Some libraries write reports behind it if something of theirs is still there at the end.
    assert done.stderr.endswith("the role ends\n")
