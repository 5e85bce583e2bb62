"""Environments that hang, fork, flood, die, lie or snoop: each is contained, and becomes a verdict."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from environment_runs import Run, until

from tandem.common.confinement import can_drop_user, readable_by_others
from tandem.common.records import Verdict
from tandem.rollout.environments import host
from tandem.rollout.environments.hosts import Hosts
from tandem.rollout.environments.process import Bounds

PlayOne = Callable[..., Any]


def processes_of(server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Everything that a server has started."""
    return psutil.Process(server.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("row", "verdict", "words"),
    [
        ({"what": "hang"}, Verdict.ENV_TIMEOUT, "step_seconds=3"),
        ({"what": "loop"}, Verdict.ENV_TIMEOUT, "step_seconds=3"),
        ({"what": "hang", "where": "reset"}, Verdict.ENV_RESET, "reset_seconds=3"),
        ({"what": "exit"}, Verdict.ENV_FAILED, "exited with 3"),
        ({"what": "exit", "where": "reset"}, Verdict.ENV_RESET, "exited with 3"),
        ({"what": "sys.exit"}, Verdict.ENV_FAILED, "SystemExit: no more"),
        ({"what": "kill"}, Verdict.ENV_FAILED, "killed by signal 9"),
        ({"what": "raise", "number": 2}, Verdict.ENV_FAILED, "has 2 ends (played_worlds.py, line"),
        ({"what": "raise", "number": 2, "where": "reset"}, Verdict.ENV_RESET, "has 2 ends"),
        ({"what": "nan"}, Verdict.ENV_FAILED, "the reward that step returned is nan"),
        ({"what": "text"}, Verdict.ENV_FAILED, "neither a number nor None"),
        ({"what": "shape"}, Verdict.ENV_FAILED, "not (observation, reward, done)"),
        ({"what": "flood"}, Verdict.ENV_FAILED, "printed more than 64 MiB; it printed: spam spam"),
        ({"what": "print"}, Verdict.ENV_FAILED, "after a line (played_worlds.py"),
        ({"what": "garbage"}, Verdict.ENV_FAILED, "refused message of an episode's process"),
        ({"what": "false reward"}, Verdict.ENV_FAILED, "inf isn't finite"),
        ({"what": "memory"}, Verdict.ENV_FAILED, "MemoryError"),
        ({"what": "file"}, Verdict.ENV_FAILED, "File too large"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_fault_becomes_a_verdict_and_never_a_reward(
    play_one: PlayOne, row: dict[str, Any], verdict: Verdict, words: str
) -> None:
    played, _ = play_one("bad", row)
    assert (played.reward, played.failure) == (None, verdict), played
    assert words in played.detail
    assert len(played.detail) <= 500


def test_after_a_fault_the_next_episode_is_played(play_one: PlayOne) -> None:
    play_one("bad", {"what": "kill"})
    played, _ = play_one("bad", {})
    assert (played.reward, played.failure) == (1.0, None)


def test_the_models_time_counts_for_the_episode_only(play: Any) -> None:
    """The model takes longer than a step may, and the second time longer than the whole episode."""

    async def body(playing: Any) -> Any:
        loop, slow = asyncio.get_running_loop(), asyncio.Event()
        times = iter([4.0, 60.0])

        def think(_: Any) -> str:
            with_pause = asyncio.run_coroutine_threadsafe(
                asyncio.wait_for(slow.wait(), next(times)), loop
            )
            try:
                with_pause.result()
            except TimeoutError:
                return "1"
            return "1"

        played = await playing.play("guess", {"number": 7}, think)
        slow.set()
        return played

    played = play(body)
    assert played.failure is Verdict.ENV_TIMEOUT
    assert "episode_seconds=7" in played.detail


def test_the_models_time_is_no_time_of_the_environment(play_one: PlayOne) -> None:
    def think(_: Any) -> str:
        threading.Event().wait(4.0)  # Longer than a step may take.
        return "7"

    began = time.monotonic()
    played, _ = play_one("guess", {"number": 7}, think)
    took = time.monotonic() - began
    assert (played.failure, played.reward) == (None, 1.5)
    assert played.seconds < took - 3.5


@pytest.mark.parametrize(
    ("then", "verdict", "words"),
    [
        ("hang", Verdict.ENV_TIMEOUT, "step_seconds=3"),
        # At once, although what it has forked lives on.
        ("die", Verdict.ENV_FAILED, "killed by signal 9"),
    ],
)
def test_what_has_forked_away_into_sessions_of_its_own_is_ended_too(
    play_one: PlayOne,
    running: subprocess.Popen[bytes],
    shared: Path,
    then: str,
    verdict: Verdict,
    words: str,
) -> None:
    left = shared / "pids"
    played, _ = play_one("bad", {"what": "fork", "then": then, "path": str(left)})
    assert played.failure is verdict
    assert words in played.detail
    pids = [int(line) for line in left.read_text().split()]
    assert len(pids) == 5
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert running.poll() is None


def test_a_process_gets_no_secret_and_nothing_that_is_open(
    play_one: PlayOne, run: Run, shared: Path
) -> None:
    row = {"what": "tell", "where": "reset", "path": str(shared / "told")}
    played, _ = play_one("bad", row)
    assert "told" in played.detail
    told = json.loads((shared / "told").read_text())
    allowed = {
        *("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "TMPDIR"),
        *("LANG", "LC_CTYPE", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    }
    assert set(told["environment"]) <= allowed
    assert "s3cret" not in json.dumps(told)
    assert str(run.join.password) not in json.dumps(told)
    assert told["environment"]["HOME"] == told["folder"]
    assert told["session"]
    assert told["memory"] == 1024 << 20
    # Its output, its input, its channel, and the folder that is being listed.
    sockets = [one for one in told["descriptors"] if one.startswith("socket:")]
    assert len(sockets) == 1
    assert len(told["descriptors"]) <= 5
    assert "Max core file size        0" in told["limits"]
    # Root's processes give up root where others can read Python and the environment's module.
    if os.geteuid() == 0 and all(map(readable_by_others, (os.__file__, str(Path(__file__))))):
        assert told["user"] != 0


def test_a_process_imports_neither_redis_nor_zmq_nor_numpy_nor_torch(
    play_one: PlayOne, shared: Path
) -> None:
    play_one("bad", {"what": "tell", "path": str(shared / "told")})
    modules = set(json.loads((shared / "told").read_text())["modules"])
    assert "msgspec" in modules
    assert not modules & {"redis", "zmq", "numpy", "torch", "transformers", "pydantic", "psutil"}


def test_its_folder_is_removed_with_it(play_one: PlayOne, shared: Path) -> None:
    play_one("bad", {"what": "tell", "path": str(shared / "told")})
    folder = Path(json.loads((shared / "told").read_text())["folder"])
    assert "tandem-environments-" in str(folder)
    until(lambda: not folder.exists())


def test_there_are_never_more_processes_than_places(
    play: Any, running: subprocess.Popen[bytes], shared: Path
) -> None:
    begun, go = shared / "begun", shared / "go"

    async def body(playing: Any) -> tuple[int, list[Any]]:
        row = {"what": "wait", "begun": str(begun), "go": str(go)}
        playing_all = [asyncio.create_task(playing.play("bad", row)) for _ in range(7)]
        async with asyncio.timeout(20):
            while not begun.exists() or len(begun.read_text().splitlines()) < 4:
                await asyncio.sleep(0.02)
        count = len(psutil.Process(running.pid).children())
        go.touch()
        return count, await asyncio.gather(*playing_all)

    count, played = play(body)
    assert count == 4
    assert [one.reward for one in played] == [1.0] * 7


AS_LONELY_ROOT = """
import os, sys
from tandem.rollout.environments import host
from tandem.rollout.environments.pipes import Order
host._files_of = lambda target: []  # Whatever Python's folder allows here.
order = Order("", "json:loads", {}, [], 1 << 34, 61000, sys.argv[1])
host.confine(order, os.getppid())
print(os.geteuid(), os.stat(".").st_uid)
"""


def test_root_who_can_become_no_other_user_stays_root(tmp_path: Path) -> None:
    """As in a container without capabilities; here in a user namespace that knows no user but root."""
    alone = ["unshare", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"]).returncode:
        pytest.skip("no user namespaces here")
    command = [*alone, sys.executable, "-c", AS_LONELY_ROOT, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == "0 0\n", ran.stderr


AS_ROOT = """
import os, socket, sys
import tandem.rollout.environments.forms.text  # While it still can.
from tandem.rollout.environments import host
from tandem.rollout.environments.pipes import Channel, Order
host.os.__file__ = host.__file__ = sys.executable = "/bin/sh"  # As if all could read Python.
ours, theirs = socket.socketpair()
ours.sendall(Order("text", "kept_world:World", {}, [sys.argv[1]], 1 << 34, 61000, sys.argv[2]).pack())
ours.shutdown(socket.SHUT_WR)
code = host.serve(Channel(theirs), os.getppid())
print(code, os.geteuid(), ours.recv(1000)[4:])
"""


@pytest.mark.parametrize(("mode", "user"), [(0o700, 0), (0o755, 61000)])
def test_root_stays_root_for_a_module_that_only_root_can_read(
    shared: Path, mode: int, user: int
) -> None:
    if not can_drop_user():
        pytest.skip("only root's processes become other users")
    for name in ("start", "own"):
        (shared / name).mkdir()
    shared.chmod(0o755)
    world = "class World:\n    def reset(self, row): ...\n    def step(self, text): ...\n"
    (shared / "start" / "kept_world.py").write_text(world)
    (shared / "start").chmod(mode)
    command = [sys.executable, "-P", "-c", AS_ROOT, str(shared / "start"), str(shared / "own")]
    ran = subprocess.run(command, capture_output=True, text=True)
    why = "" if user else f"not every user may read {shared / 'start/kept_world.py'}"
    assert ran.stdout == f"0 {user} {msgspec.msgpack.encode(['ready', why])!r}\n", ran.stderr


def test_the_log_says_which_file_keeps_an_environment_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not can_drop_user():
        pytest.skip("only root's processes become other users")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    spec = {"form": "text", "target": "played_worlds:Guess", "params": {}, "reads": [str(private)]}
    # Where Python itself is private, that is the reason.
    files = (os.__file__, host.__file__, str(private))
    first = next(file for file in files if not readable_by_others(file))
    bounds = Bounds(reset_seconds=30, step_seconds=30, episode_seconds=30, memory_mb=2048)

    async def body() -> None:
        hosts = Hosts({"guess": spec}, bounds, 2, [str(Path(__file__).parent)])
        try:
            await hosts.check("guess")
        finally:
            await hosts.close()

    asyncio.run(body())
    (said,) = [one.message for one in caplog.records if "root" in one.message]
    assert said.startswith("environment guess is played as root: not every user may read /")
    assert first in said


WITH_OUTPUTS = """
import os, sys
from tandem.rollout.environments import host
from tandem.rollout.environments.pipes import Order
host._files_of = lambda target: []  # Whatever Python's folder allows here.
root, own = sys.argv[1:]
outputs = f"{root}/experiments/outputs/tandem-1"
order = Order("", "json:loads", {}, [], 1 << 34, 61000, own, [root], outputs)
host.confine(order, os.getppid())
open(f"{outputs}/written", "w").close()
print(os.geteuid(), os.stat(f"{outputs}/written").st_uid)
"""


@pytest.mark.parametrize(("mode", "user"), [(0o700, 0), (0o755, 61000)])
def test_a_user_who_writes_elsewhere_gets_a_folder_there(
    shared: Path, mode: int, user: int
) -> None:
    """As AppWorld's servers do, below a root that root has made."""
    if not can_drop_user():
        pytest.skip("only root's processes become other users")
    for name in ("root", "own"):
        (shared / name).mkdir()
    (shared / "root").chmod(mode)
    command = [sys.executable, "-c", WITH_OUTPUTS, str(shared / "root"), str(shared / "own")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == f"{user} {user}\n", ran.stderr
