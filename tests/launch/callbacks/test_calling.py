"""The callbacks' process: what it may do, what it may not, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tandem.common.errors import ConfigError
from tandem.launch.callbacks import caller
from tandem.launch.callbacks.caller import Caller, Ended
from tandem.launch.callbacks.handle import Handle

MODULE = """
import os, subprocess, sys, time

def asks(step, metrics, handle):
    handle.log("seen/loss", metrics["train/loss"])
    handle.log("step", step)
    handle.stop("enough  \\n of it")
    handle.stop("a second reason")
    handle.checkpoint()
    handle.evaluate()

def quiet(step, metrics, handle):
    pass

def raises(step, metrics, handle):
    handle.log("before", 1)
    raise ValueError("no good")

def exits(step, metrics, handle):
    sys.exit(3)

def ends(step, metrics, handle):
    os._exit(7)

def hangs(step, metrics, handle):
    time.sleep(1000)

def eats(step, metrics, handle):
    bytearray(1 << 32)

def floods(step, metrics, handle):
    for _ in range(200):
        print("x" * 100_000)

def babbles(step, metrics, handle):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"not an answer\\n")
        except OSError:
            pass

def answers_for_ever(step, metrics, handle):
    while True:
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"x" * 65536)
            except OSError:
                pass

def starts(step, metrics, handle):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    handle.log("child", child.pid)

def starts_and_hangs(step, metrics, handle):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(child.pid, flush=True)
    time.sleep(1000)

def secret(step, metrics, handle):
    handle.log("secret", "TANDEM_REDIS_PASSWORD" in os.environ)

async def waits(step, metrics, handle):
    pass

def two(step, metrics):
    pass

number = 1
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_callbacks.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("raise OSError('no display')")
    (tmp_path / "ending.py").write_text("import os; os._exit(9)")
    (tmp_path / "large.py").write_text("held = bytearray(1 << 32)")
    monkeypatch.chdir(tmp_path)


Made = Callable[..., Caller]


@pytest.fixture
def started() -> Iterator[Made]:
    """Starts callers, which are closed at the end."""
    made: list[Caller] = []

    def start(*names: str, seconds: float = 20.0, memory_mb: int = 512, output=None) -> Caller:
        paths = [f"my_callbacks:{name}" for name in names]
        one = Caller(paths, seconds=seconds, memory_mb=memory_mb, output=output)
        made.append(one)
        one.start()
        return one

    yield start
    for one in made:
        one.close()


def test_what_a_call_asks_for_comes_back_with_its_end(started: Made) -> None:
    answer = started("quiet", "asks").call(1, 4, {"train/loss": 0.5})
    assert answer.error == ""
    assert answer.asked.stop == "enough of it"
    assert (answer.asked.checkpoint, answer.asked.evaluate) == (True, True)
    assert answer.asked.values == {"seen/loss": 0.5, "step": 4.0}
    assert "my_callbacks" not in sys.modules


@pytest.mark.parametrize(
    ("name", "last"),
    [("raises", "ValueError: no good"), ("exits", "SystemExit: 3"), ("eats", "MemoryError")],
)
def test_an_exception_comes_back_and_the_process_goes_on(
    started: Made, name: str, last: str
) -> None:
    one = started(name, "quiet")
    answer = one.call(0, 1, {})
    assert answer.error.rstrip().endswith(last)
    assert "my_callbacks.py" in answer.error
    assert answer.asked.values == ({"before": 1.0} if name == "raises" else {})
    assert one.call(1, 1, {}).error == ""


def test_a_process_that_ends_is_told_and_started_again(started: Made) -> None:
    one = started("ends", "quiet")
    with pytest.raises(Ended, match="ended with exit code 7"):
        one.call(0, 1, {})
    assert not one.running
    one.start()
    assert one.call(1, 1, {}).error == ""


def test_a_call_that_hangs_is_killed_at_its_deadline(started: Made) -> None:
    one = started("hangs", seconds=0.5)
    with pytest.raises(Ended, match=r"was killed: the call didn't end in 0\.5 s"):
        one.call(0, 1, {})
    assert not one.running


def test_a_wait_ends_early_when_the_run_ends(started: Made) -> None:
    one = started("hangs")
    one.cut_at = time.monotonic() + 0.2
    with pytest.raises(Ended):
        one.call(0, 1, {})


def test_what_a_callback_started_ends_with_its_process(started: Made) -> None:
    printed: list[bytes] = []
    one = started("starts", "starts_and_hangs", seconds=5.0, output=printed.append)
    first = int(one.call(0, 1, {}).asked.values["child"])
    assert psutil.pid_exists(first)
    with pytest.raises(Ended):
        one.call(1, 1, {})
    second = int(b"".join(printed).split()[-1])
    end = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and alive(pid) for pid in (first, second)):
        assert time.monotonic() < end
        time.sleep(0.02)


HOST = """
import sys, time
from tandem.launch.callbacks.caller import Caller
one = Caller(["my_callbacks:starts"], seconds=20.0, memory_mb=512)
one.start()
print(int(one.call(0, 1, {}).asked.values["child"]), flush=True)
time.sleep(600)
"""


def test_what_a_callback_started_ends_though_its_host_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        child = int(host.stdout.readline())
        assert alive(child)
        host.kill()
    end = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_is_printed_is_kept_up_to_a_limit(started: Made) -> None:
    printed: list[bytes] = []
    one = started("floods", output=printed.append)
    assert one.call(0, 1, {}).error == ""
    end = time.monotonic() + 10
    while b"is left out" not in b"".join(printed):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert caller.OUTPUT_BYTES < len(b"".join(printed)) < caller.OUTPUT_BYTES + 200


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("babbles", "said something other than it should"),
        ("answers_for_ever", "its answer is over"),
    ],
)
def test_a_callback_that_writes_on_the_socket_ends_its_process(
    started: Made, name: str, said: str
) -> None:
    with pytest.raises(Ended, match=said):
        started(name).call(0, 1, {})


def test_the_password_of_redis_is_not_handed_on(
    started: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_REDIS_PASSWORD", "x")
    assert "TANDEM_REDIS_PASSWORD" in os.environ
    assert started("secret").call(0, 1, {}).asked.values == {"secret": 0.0}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_callbacks:missing", "has no attribute 'missing'"),
        ("elsewhere:one", "No module named 'elsewhere'"),
        ("broken:one", "OSError: no display"),
        ("large:one", "MemoryError"),
        ("my_callbacks:number", "isn't a function: 1"),
        ("my_callbacks:waits", "is an async function"),
        ("my_callbacks:two", r"can't be called with \(step, metrics, handle\)"),
    ],
)
def test_what_is_no_callback_is_refused(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"run.callbacks={path}.*{said}"):
        Caller([path], seconds=1.0, memory_mb=512).start()


def test_a_module_that_ends_the_interpreter_is_told() -> None:
    with pytest.raises(Ended, match="ended with exit code 9"):
        Caller(["ending:one"], seconds=1.0, memory_mb=512).start()


@pytest.mark.parametrize("name", ["", "a b", "a//b", "/a", "x" * 81, "failures", 3])
def test_a_name_that_is_none_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"name a metric|are counted"):
        Handle().log(name, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None])
def test_a_value_that_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="isn't a finite number"):
        Handle().log("a", value)  # type: ignore[arg-type]


def test_the_number_of_names_is_bounded() -> None:
    handle = Handle()
    for number in range(100):
        handle.log(f"n{number}", number)
    handle.log("n7", 1.0)
    with pytest.raises(ValueError, match="one name too many"):
        handle.log("another", 1.0)
    assert len(handle.asked()["values"]) == 100
