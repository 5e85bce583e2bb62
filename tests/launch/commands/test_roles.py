"""A role that is started by hand: its threads, and that it ends with one that it can't do without; and what it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.launch.commands import roles
from tandem.launch.plan import hardware
from tandem.launch.run.opened.presets import load

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
