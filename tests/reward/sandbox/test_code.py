"""The code reward: which program, which tests, what they pay, and that a program reaches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.errors import ConfigError, TandemError
from tandem.common.records import Verdict
from tandem.reward.components.code import CodeReward, code, last_block, read_tests
from tandem.reward.components.registry import component
from tandem.reward.grading import Grade, GradeItem, Grader
from tandem.reward.sandbox import entering, sandbox
from tandem.reward.sandbox.code_runner import Runner, same_output, same_result, same_value
from tandem.reward.sandbox.expected import expected


@pytest.fixture(scope="session")
def runner() -> Runner:
    """A runner in this process, which itself executes none of the programs."""
    try:
        return Runner("auto")
    except ConfigError as error:
        if os.environ.get("CI"):
            pytest.fail(f"no sandbox holds here any more: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def coder(runner: Runner) -> Iterator[Grader]:
    parts = (ComponentConfig(name="code", params={"seconds": 2.0}),)
    with Grader(RewardConfig(components=parts, graders=1)) as grader:
        grader.canary()
        yield grader


def run(runner: Runner, program: str, *tests: list[str], **changes: Any) -> tuple[int, int, int]:
    settings: dict[str, Any] = {"seconds": 20.0, "total_seconds": 60.0, "memory_mb": 256}
    return runner.run(program, tests, **{**settings, "stop": False, **changes})


def output(box: sandbox.Box, program: str, memory_mb: int = 512) -> str:
    """What a program writes in the sandbox."""
    limits = sandbox.Limits(seconds=10.0, memory_mb=memory_mb)
    ran = box.run(["-I", "-c", program], b"", b"", limits)
    return ran.output.decode().strip()


# --- which program, which tests ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nbetter:\n```python\nx = 2\n```\ndone", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```text\n1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n1\n```", "x = 1\n"),
        ("```python\nx = 1", None),
        ("x = 1", None),
    ],
)
def test_the_program_is_the_last_closed_block(text: str, program: str | None) -> None:
    assert last_block(text, ("python", "py")) == program


@pytest.mark.parametrize(
    ("given", "tests"),
    [
        (["assert f(2) == 4"], [["assert", "assert f(2) == 4"]]),
        ('["assert f(2) == 4"]', [["assert", "assert f(2) == 4"]]),
        ([{"input": "1\n", "output": "2\n"}], [["io", "1\n", "2\n"]]),
        ({"inputs": ["1"], "outputs": ["2"]}, [["io", "1", "2"]]),
        (
            {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
            [["call", "add", "[1, 2]", "3"]],
        ),
        (
            {"test_cases": [{"input": "1", "output": "2", "type": "stdin_stdout"}]},
            [["io", "1", "2"]],
        ),
    ],
)
def test_tests_are_read_in_the_forms_that_datasets_have(given: Any, tests: list[Any]) -> None:
    assert read_tests(given) == tests


@pytest.mark.parametrize("given", ["no json", {}, [], [1], {"inputs": [1], "outputs": []}])
def test_tests_that_cannot_be_read_are_no_tests(given: Any) -> None:
    with pytest.raises(ValueError):
        read_tests(given)


@pytest.mark.parametrize(
    "params",
    [{"pay": "some"}, {"sandbox": "none"}, {"seconds": 0}, {"seconds": 9, "total_seconds": 1},
     {"memory_mb": 1}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reward component code"):
        component("code", params)


# --- what passes ------------------------------------------------------------------------------

SQUARE = "def f(x):\n    return x * x\n"


def test_assertions_are_run_after_the_program(runner: Runner) -> None:
    assert run(runner, SQUARE, ["assert", "assert f(2) == 4"], ["assert", "assert f(2) == 5"]) == (
        1, 2, 0,
    )  # fmt: skip


@pytest.mark.parametrize("annotation", ["int", "'int'"])
def test_a_program_may_define_dataclasses_and_pickle_them(runner: Runner, annotation: str) -> None:
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle\n"
        f"@dataclass\nclass Node:\n    v: {annotation}\n"
        "def f(x): return pickle.loads(pickle.dumps(Node(x))).v * 2\n"
    )
    tests = (["assert", "assert f(2) == 4"], ["call", "f", "[2]", "4"])
    assert run(runner, program, *tests) == (2, 2, 0)
    printed = f"{program}print(f(int(input())))\n"
    assert run(runner, printed, ["io", "2\n", "4"]) == (1, 1, 0)


def test_standard_output_is_compared_line_by_line(runner: Runner) -> None:
    adds = "import sys\nprint(sum(map(int, input().split())), ' ')\nsys.exit()"
    assert run(runner, adds, ["io", "1 2\n", "3"], ["io", "1 2\n", "4"]) == (1, 2, 0)
    assert not same_output(b"1 2", "12")


def test_a_function_is_called_with_the_tests_arguments(runner: Runner) -> None:
    solution = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    tests = [["call", "add", "[1, 2]", "3"], ["call", "add", "[1, 2]", "[3]"]]
    assert run(runner, solution, *tests) == (2, 2, 0)


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import os; os.write(3, b'0' * 32)",
        "assert True\nquit()",
        "1/0",
        "syntax error",
    ],
)
def test_a_program_that_leaves_before_its_test_has_passed_nothing(
    runner: Runner, program: str
) -> None:
    assert run(runner, program, ["assert", "assert False"]) == (0, 1, 0)


def test_what_is_too_slow_fails_and_the_others_still_run(runner: Runner) -> None:
    program = "def f(x):\n    while x: pass\n    return 1"
    tests = [["assert", "f(1)"], ["assert", "f(0)"]]
    assert run(runner, program, *tests, seconds=1.0) == (1, 2, 1)


def test_all_pass_stops_at_the_first_failure(runner: Runner) -> None:
    tests = [["assert", "assert False"], ["assert", "assert True"]]
    assert run(runner, "", *tests, stop=True) == (0, 2, 0)
    assert code(pay="all").judge(1, 2) == (0.0, Verdict.WRONG)
    assert code(pay="all").judge(2, 2) == (1.0, Verdict.CORRECT)


CHEATS = (
    # The comparison was made in the program's process, by a json that was the program's to patch.
    """
import json
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
json.loads = lambda text: Anything()
json.dumps = lambda value: "1"
def f(*numbers): return 1
""",
    """
class Anything(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(*numbers): return Anything(1)
""",
    # What it is asked to find isn't told in any frame, and a report of its own is only a wrong answer.
    """
import sys
def f(*numbers):
    frame, told = sys._getframe(), []
    while frame is not None:
        told.append({**frame.f_locals, **frame.f_globals})
        frame = frame.f_back
    for names in told:
        for value in list(names.values()):
            if "48" + "271" in repr(value):
                return int("48" + "271")
    return 1
""",
    "import os\nfor number in range(3, 20):\n    try: os.write(number, b'true')\n    except OSError: pass\nos._exit(0)",
    "import builtins, atexit\nbuiltins.bool = lambda x: True\natexit.register(lambda: None)\ndef f(x): return 1",
)


@pytest.mark.parametrize("program", CHEATS)
@pytest.mark.parametrize(
    "test",
    [
        ["call", "f", "[2]", "48271"],
        ["call", "f", "[2]", "[48271]"],
        ["assert", "assert f(2) == 48271"],
        ["assert", "assert 48271 == f(2), 'two'"],
    ],
)
def test_a_program_that_tampers_with_its_process_passes_no_test(
    runner: Runner, program: str, test: list[str]
) -> None:
    assert run(runner, program, test) == (0, 1, 0)


@pytest.mark.parametrize(
    ("body", "test"),
    [
        (
            "(1, [2.5, None], {'a': {3}, b'b': 1j})",
            "f(0) == (1, [2.5, None], {'a': {3}, b'b': 1j})",
        ),
        ("__import__('collections').OrderedDict(a=1)", "f(0) == {'a': 1}"),
        ("__import__('collections').Counter('aab')", "f(0) == {'a': 2, 'b': 1}"),
        ("__import__('collections').namedtuple('P', 'x y')(1, 2)", "f(0) == (1, 2)"),
        ("__import__('decimal').Decimal('0.5')", "f(0) == 0.5"),
        ("True", "f(0) is True"),
        ("None", "f(0) is None"),
        ("float('inf')", "f(0) == float('inf')"),
        ("0.1 + 0.2", "abs(f(0) - 0.3) < 1e-9"),
        ("0", "not f(0)"),
        ("[]", "f(0) != [1] and isinstance(f(0), list)"),
        ("frozenset({1})", "f(0) == {1}"),
        ("'é\\n'", "'é\\n' == f(0)"),
    ],
)
def test_an_assertion_holds_as_it_would_in_the_program(
    runner: Runner, body: str, test: str
) -> None:
    program = f"def f(x):\n    return {body}\n"
    passes, fails = ["assert", f"assert {test}"], ["assert", f"assert not ({test})"]
    assert run(runner, program, passes, fails) == (1, 2, 0)


@pytest.mark.parametrize(
    ("body", "test"),
    [
        ("[1, 2]", "f(0) == (1, 2)"),
        ("1", "f(0) is True"),
        ("1", "f(0) == '1'"),
        ("{1: 2}", "f(0) == {'1': 2}"),
    ],
)
def test_a_value_of_another_kind_is_another_value(runner: Runner, body: str, test: str) -> None:
    program = f"def f(x):\n    return {body}\n"
    assert run(runner, program, ["assert", f"assert {test}"]) == (0, 1, 0)


@pytest.mark.parametrize(
    "report",
    [b"", b"4", b"null", b"[]", b"[[]]", b'["float"]', b'["float", "x"]', b'["complex", "1"]', b"\xff",
     b'["fraction", 1, 0]', b'["fraction", 1e999, 1]', b'["dict", 1]', b'["dict", [["list"], 1]]',
     b"[" * 100_000, b'["bytes", "x"]', b"9" * 100_000, b'{"list": 1}'],
)  # fmt: skip
def test_a_report_that_is_none_is_a_wrong_answer(report: bytes) -> None:
    asked = expected("assert f(2) == [5]")
    assert asked is not None
    assert not same_value(report, asked)
    assert not same_result(report, "[5]")


def test_several_lines_run_in_the_program(runner: Runner) -> None:
    tests = [["assert", "x = f(2)\nassert x == 4"], ["assert", "x = f(2)\nassert x == 5"]]
    assert run(runner, SQUARE, *tests) == (1, 2, 0)


# --- what a program reaches -------------------------------------------------------------------


def test_it_sees_no_file_of_ours_and_no_secret(box: sandbox.Box, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    secret = tmp_path / "join.json"
    secret.write_text("s3cret")
    secret.chmod(0o666)
    home = str(Path.home() / ".bashrc")
    for path in (str(secret), str(Path(__file__)), "/etc/passwd", "/etc/shadow", home):
        assert output(box, f"import os; print(os.path.exists({path!r}))") == "False"
    assert output(box, "import os; print(sorted(os.listdir('/boxed')))") == "[]"
    # Its own interpreter and libraries are there, and can't be changed.
    where = "import json, os; print(os.access(json.__file__, os.W_OK))"
    assert output(box, where) == "False"


def test_it_has_no_network_no_root_and_no_other_process(box: sandbox.Box) -> None:
    connect = "import socket\ntry:\n    socket.create_connection(('1.1.1.1', 53), 1)\nexcept OSError as e:\n    print(e.errno)"
    assert output(box, connect) == "101"  # network is unreachable
    assert output(box, "import os; print(os.getuid() != 0, os.getpid() < 10)") == "True True"
    kill = f"import os\ntry:\n    os.kill({os.getpid()}, 9)\nexcept ProcessLookupError:\n    print('none')"
    assert output(box, kill) == "none"
    for attempt in ("os.setuid(0)", "os.chroot('/')", "os.mknod('d', 0o60666)"):
        tried = f"import os\ntry:\n    {attempt}\n    print('done')\nexcept OSError:\n    print('refused')"
        assert output(box, tried) == "refused"


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(1 << 30)",
        "f = open('big', 'wb')\nfor _ in range(100): f.write(b'0' * (1 << 20))",
        "import os\nwhile True: os.fork()",
        "while True: print('x' * 100000)",
    ],
)
def test_it_uses_up_no_more_than_it_may(runner: Runner, program: str) -> None:
    assert run(runner, program, ["assert", "assert True"], seconds=3.0)[0] == 0


TAKES = "took = lambda: print('took', flush=True)\n"
BEYOND = (
    # System V segments that nobody has mapped any more.
    """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for number in range(8):
    segment = libc.shmget(0, 50 << 20, 0o1600)
    assert segment >= 0
    at = libc.shmat(segment, None, 0)
    ctypes.memset(at, 1, 50 << 20)
    libc.shmdt(ctypes.c_void_p(at))
took()
""",
    # Files of 15 MiB where shared memory is, if there is such a folder: bubblewrap makes one.
    """
import os
if not os.access("/dev/shm", os.W_OK): raise SystemExit
for number in range(30): open(f"/dev/shm/{number}", "wb").write(b"1" * (15 << 20))
took()
""",
    # Memory files, 15 MiB each, which no limit of a file's size stops.
    """
import os
for number in range(30):
    file = os.memfd_create("m")
    for _ in range(15): os.write(file, b"1" * (1 << 20))
took()
""",
    # Processes of which each is within its own limit.
    """
import os, time
read, write = os.pipe()
for number in range(5):
    if os.fork() == 0:
        held = bytearray(b"1") * (80 << 20)
        os.write(write, b"1")
        time.sleep(60)
for number in range(5): os.read(read, 1)
time.sleep(1)
took()
""",
    # Shared maps of processes that have left their session.
    """
import mmap, os, time
read, write = os.pipe()
for number in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            held = mmap.mmap(-1, 80 << 20)
            for at in range(0, 80 << 20, 4096): held[at] = 1
            os.write(write, b"1")
            time.sleep(60)
        os._exit(0)
for number in range(5): os.read(read, 1)
time.sleep(1)
took()
""",
    # A file system in memory of its own size.
    """
import ctypes, os
libc = ctypes.CDLL(None)
uid = os.getuid()
assert libc.unshare(0x10020000) == 0
assert libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"size=2000m") == 0
for number in range(30):
    with open(f"/tmp/{number}", "wb") as file:
        for _ in range(15): file.write(b"1" * (1 << 20))
took()
""",
    # Its working folder and itself.
    """
held = bytearray(b"1") * (80 << 20)
for number in range(4):
    with open(str(number), "wb") as file:
        for _ in range(15): file.write(b"1" * (1 << 20))
import time
time.sleep(1)
took()
""",
)


FILTERED = """
import ctypes, os
from tandem.reward.sandbox.syscall_filter import refuse_calls
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
refuse_calls()
segment = libc.shmget(0, 4096, 0o600)
libc.shmctl(segment, 0, None)  # It would outlive the process.
print(segment, libc.memfd_create(b"file", 0))
print(libc.ptrace(0, 0, None, None), libc.process_vm_writev(os.getpid(), None, 0, None, 0, 0))
"""
"""Says -1 for each call that is refused; without the filter the last two take and write nothing, and succeed."""


def test_the_filter_refuses_memory_that_no_process_has_mapped_and_other_processes() -> None:
    """Tried without a sandbox: one whose filter lets them through counts as none, so that its tests are
    skipped."""
    said = subprocess.run([sys.executable, "-c", FILTERED], capture_output=True, text=True)
    assert said.stdout == "-1 -1\n-1 -1\n", said.stderr


@pytest.mark.parametrize("program", BEYOND)
def test_memory_is_limited_for_all_that_it_starts_together(box: sandbox.Box, program: str) -> None:
    limits = sandbox.Limits(seconds=20.0, memory_mb=128)
    ran = box.run(["-I", "-c", TAKES + program], b"", b"", limits)
    assert b"took" not in ran.output
    assert not ran.timed_out


def test_what_processes_share_is_counted_once(box: sandbox.Box) -> None:
    program = """
import os, time
held = bytearray(b"1") * (60 << 20)
for number in range(5):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
for number in range(5): os.wait()
print("done")
"""
    limits = sandbox.Limits(seconds=20.0, memory_mb=128)
    assert box.run(["-I", "-c", program], b"", b"", limits).output == b"done\n"


def test_the_memory_of_the_process_that_starts_it_is_not_its_own(
    box: sandbox.Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(build: Callable[..., None] = entering._build_root) -> None:
        time.sleep(0.2)
        build()

    monkeypatch.setattr(entering, "_build_root", slow)
    held = bytearray(b"1") * (600 << 20)
    assert output(box, "print('done')", memory_mb=128) == "done"
    del held


def test_what_it_started_ends_with_it(runner: Runner) -> None:
    # It leaves its session, so that only the end of its process namespace can reach it.
    orphan = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(321)\n"
        "    os._exit(0)\n"
    )
    before = {p.pid for p in psutil.process_iter()}
    assert run(runner, orphan + "time.sleep(1000)", ["io", "", ""], seconds=1.0) == (0, 1, 1)
    assert run(runner, orphan, ["io", "", ""]) == (1, 1, 0)
    mine = f"-c\x00{orphan[:20]}"
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if mine in "\x00".join(p.info["cmdline"] or [])]


def test_where_no_sandbox_works_it_refuses_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], limits: sandbox.Limits) -> None:
        raise OSError("Operation not permitted")

    monkeypatch.setattr(sandbox, "WAYS", (sandbox.Box(how="namespaces", enter=fails),))
    with pytest.raises(ConfigError, match=r"no sandbox works here .*not permitted.*bubblewrap"):
        sandbox.find("auto")


def test_a_way_that_holds_nothing_counts_as_none() -> None:
    unboxed = sandbox.find("none, I trust what the model writes")
    assert sandbox.probe(unboxed).startswith("a program ")


def test_a_grader_whose_sandbox_is_missing_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    part = ComponentConfig(name="code", params={"sandbox": "bubblewrap"})
    with Grader(RewardConfig(components=(part,), graders=1)) as grader:
        with pytest.raises(TandemError, match="bwrap isn't installed"):
            grader.canary()


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (["x = 1", [["assert", "assert x == 2"]], 10.0, 10.0, 512, True], "it failed its test"),
        # The kernel takes no limit of that size, so that no box can be set up.
        (["x = 1", [["assert", "assert x == 1"]], 10.0, 10.0, 1 << 44, True], "the sandbox failed"),
    ],
)
def test_a_grader_whose_sandbox_fails_its_trial_does_not_start(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, trial: list[Any], told: str
) -> None:
    monkeypatch.setattr(CodeReward, "trial", staticmethod(lambda: trial))
    with Grader(RewardConfig(components=(ComponentConfig(name="code"),), graders=1)) as grader:
        with pytest.raises(TandemError, match=f"the sandbox is broken.*{told}.*params.sandbox"):
            grader.canary()


# --- through the grader -----------------------------------------------------------------------


def graded(grader: Grader, text: str, tests: Any) -> Grade:
    item = GradeItem(text=f"thoughts</think>\n{text}", gold="", extra={"tests": json.dumps(tests)})
    return grader.grade_texts([item])[0]


def test_the_share_of_passed_tests_is_paid_and_is_the_verdict(coder: Grader) -> None:
    tests = ["assert f(2) == 4", "assert f(3) == 9"]
    right = graded(coder, f"```python\n{SQUARE}```", tests)
    half = graded(coder, "```python\ndef f(x): return 4\n```", tests)
    assert (right.verdict, right.reward, right.extracted) == (Verdict.CORRECT, 1.0, SQUARE)
    assert (half.verdict, half.reward) == (Verdict.WRONG, 0.5)


def test_a_function_sees_the_verdict_of_the_tests_and_the_program(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "seen_rewards.py").write_text(
        "def seen(verdict, extracted, **columns):\n"
        "    return [float(v == 'correct' and 'def f' in e) for v, e in zip(verdict, extracted)]\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    parts = (ComponentConfig(name="seen_rewards:seen"), ComponentConfig(name="code"))
    with Grader(RewardConfig(components=parts, graders=1)) as grader:
        right = graded(grader, f"```python\n{SQUARE}```", ["assert f(2) == 4"])
        wrong = graded(grader, f"```python\n{SQUARE}```", ["assert f(2) == 5"])
    assert right.components == {"seen_rewards:seen": 1.0, "code": 1.0}
    assert wrong.components == {"seen_rewards:seen": 0.0, "code": 0.0}


def test_a_crash_of_the_sandbox_pays_nothing_where_accuracy_pays_for_the_tests() -> None:
    parts = (ComponentConfig(name="accuracy"), ComponentConfig(name="code", weight=0.0))
    # The kernel takes no limit of that size, so that no box can be set up.
    beyond = ComponentConfig(name="code", weight=0.0, params={"memory_mb": 1 << 44})
    program = f"```python\n{SQUARE}```"
    with Grader(RewardConfig(components=parts, graders=1)) as grader:
        passed = graded(grader, program, ["assert f(2) == 4"])
    with Grader(RewardConfig(components=(parts[0], beyond), graders=1)) as grader:
        crashed = graded(grader, program, ["assert f(2) == 4"])
    assert (passed.verdict, passed.reward) == (Verdict.CORRECT, 1.0)
    assert (crashed.verdict, crashed.reward) == (Verdict.CRASHED, None)


FEIGNED = """
import os
for number in range(20):
    try: os.write(number, b"box: No space left on device")
    except OSError: pass
os._exit(126)
"""


def test_a_program_cannot_feign_a_failure_of_its_sandbox(coder: Grader) -> None:
    grade = graded(coder, f"```python{FEIGNED}```", ["assert f(2) == 4"])
    assert (grade.verdict, grade.reward) == (Verdict.WRONG, 0.0)


def test_no_program_of_any_way_can_write_where_a_failure_is_told(box: sandbox.Box) -> None:
    ran = box.run(["-I", "-c", FEIGNED], b"", b"", sandbox.Limits(seconds=10.0))
    assert (ran.status, ran.failure) == (126, "")


def test_a_box_that_cannot_be_made_says_why() -> None:
    def fails(command: list[str], limits: sandbox.Limits) -> None:
        raise OSError("Operation not permitted")

    broken = sandbox.Box(how="namespaces", enter=fails)
    ran = broken.run(["-c", ""], b"", b"", sandbox.Limits(seconds=10.0))
    assert (ran.failure, ran.output) == ("Operation not permitted", b"")


def test_a_text_without_a_program_is_unparsable(coder: Grader) -> None:
    grade = graded(coder, "def f(x): return x * x", ["assert f(2) == 4"])
    assert (grade.verdict, grade.reward) == (Verdict.UNPARSABLE, 0.0)


def test_tests_that_cannot_be_read_are_no_fault_of_the_text(coder: Grader) -> None:
    grade = graded(coder, f"```python\n{SQUARE}```", {"nothing": 1})
    assert (grade.verdict, grade.reward) == (Verdict.GOLD_UNPARSABLE, None)


def test_a_row_without_tests_has_no_value_of_code(coder: Grader) -> None:
    (grade,) = coder.grade_texts([GradeItem(text="\\boxed{2}", gold="2")])
    assert (grade.verdict, grade.components, grade.reward) == (
        Verdict.CORRECT, {"code": None}, None,
    )  # fmt: skip


def test_runners_hang_no_longer_than_their_programs_deadline(coder: Grader) -> None:
    grade = graded(coder, "```python\nwhile True: pass\n```", ["assert True"])
    assert (grade.verdict, grade.reward) == (Verdict.WRONG, 0.0)
    assert coder.stats()["code_timeouts"] == 1
