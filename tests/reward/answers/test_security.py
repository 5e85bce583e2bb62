"""Nothing that a model or a data set wrote is ever executed, whatever the mode."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.common.config import RewardConfig
from tandem.common.records import Verdict
from tandem.reward.answers import guard
from tandem.reward.grading import GradeItem, Grader
from tandem.reward.reading import modes


def _payloads(canary: Path) -> list[str]:
    file = str(canary)
    return [
        f"__import__('os').system('touch {file}')",
        f"os.system('touch {file}')",
        f"__import__('pathlib').Path('{file}').touch()",
        f"open('{file}', 'w')",
        f"eval(\"open('{file}','w')\")",
        f"exec(\"open('{file}','w').write('x')\")",
        f"__import__('subprocess').run(['touch','{file}'])",
        f"(lambda: open('{file}','w'))()",
        f"[x for x in (1,) if open('{file}','w')]",
        f"Function('f').__class__.__init__.__globals__['__builtins__']['open']('{file}','w')",
        "Symbol('x').__class__.__mro__[-1].__subclasses__()",
        f"sympify(\"open('{file}','w')\")",
        f"parse_expr(\"open('{file}','w')\")",
        f"x.__class__.__base__.__subclasses__()[0]('{file}')",
        f"1 if open('{file}','w') else 2",
        f'f\'{{open("{file}","w")}}\'',
        f"{{0.__class__.__init__.__globals__}} {file}",
        "%s%s%s%n",
        f"\\input{{{file}}}",
        f"\\immediate\\write18{{touch {file}}}",
        f"\\write18{{touch {file}}}",
        f"\\openout1={file}",
        "\\def\\x{\\x\\x}\\x",
        "\\newcommand{\\a}{\\a}\\a",
        "\\catcode`\\@=11 \\csname end\\endcsname",
        f"\\text{{$(touch {file})}}",
        f"$(touch {file})",
        f"`touch {file}`",
        f"; touch {file}",
        f"1\x00; touch {file}",
        f"\\operatorname{{open}}('{file}')",
        f"\\mathrm{{__import__}}('os').system('touch {file}')",
        f"!!python/object/apply:os.system ['touch {file}']",
        "cposix\nsystem\n(S'id'\ntR.",
        "\ud83d\udce6" * 50,
        "\udcff42",
        "{" * 5000,
        "\\boxed{" * 500,
        "9" * 3000,
        "9^{9^{9^{9}}}",
        "(" * 60 + "1" + ")" * 60,
        "\\frac{" * 30 + "1" + "}{2}" * 30,
    ]


def _texts(payload: str) -> list[str]:
    """Where each kind of mode looks for an answer."""
    return [
        f"<think>so</think> \\boxed{{{payload}}}",
        f"<think>so</think> <answer>{payload}</answer>",
        f"so</think> The final answer is ${payload}$. I hope it is correct.",
        f"The answer is: {payload}\n#### {payload}",
    ]


@pytest.fixture(scope="module")
def hardened() -> Iterator[Grader]:
    with Grader(RewardConfig(deadline_seconds=5.0)) as made:
        made.canary()
        yield made


class _Watch:
    """Children of the grader processes, and their sockets, looked for while they work."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.seen: list[str] = []
        self.looks = 0

    def _look(self) -> None:
        over = False
        while not over:
            over = self._stop.wait(
                0.05
            )  # with a last look, since some modes need no grader and are done by then
            for pid in list(self._grader.grader_pids()):
                try:
                    # Its own file: psutil would look at every process of the machine.
                    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
                    sockets = psutil.Process(pid).net_connections("inet")
                except (OSError, psutil.Error):
                    continue
                self.seen += [f"child {child}" for child in children]
                self.seen += [f"socket {connection}" for connection in sockets]
                self.looks += 1

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


@pytest.fixture
def canary() -> Iterator[Path]:
    """A file that any user could make, the graders' too: pytest's own folders are closed to them."""
    with tempfile.TemporaryDirectory(prefix="tandem-canary-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder) / "canary"


@pytest.mark.parametrize("name", sorted(modes.MODES))
def test_no_payload_is_executed_in_any_mode(hardened: Grader, name: str, canary: Path) -> None:
    items = [
        GradeItem(text=text, gold=gold)
        for payload in _payloads(canary)
        for text in _texts(payload)
        # A number is compared at once; a formula sends the answer to a grader process.
        for gold in (("4217", "x^2+1") if modes.mode(name).compare == "math" else ("B",))
    ]
    hardened.mode = modes.mode(name)
    with _Watch(hardened) as watch:
        grades = hardened.grade_texts(items)
    assert [g for g in grades if g.verdict is Verdict.CORRECT] == []
    assert not canary.exists()
    assert watch.looks > 0
    assert watch.seen == []


def test_a_payload_as_the_gold_answer_is_not_executed_either(
    hardened: Grader, canary: Path
) -> None:
    hardened.mode = modes.mode("boxed")
    hardened.grade_texts(
        [
            GradeItem(text="\\boxed{x+1}", gold=payload)
            for payload in _payloads(canary)
            # A gold answer isn't guarded; those that only take long are other tests' matter.
            if not guard.dangerous(payload)
        ]
    )
    assert not canary.exists()


def test_the_canary_file_would_be_seen(canary: Path) -> None:
    """The check itself: the same payloads do run where a text is evaluated."""
    eval(_payloads(canary)[3])
    assert canary.exists()


def test_graders_go_on_after_all_that(hardened: Grader) -> None:
    hardened.mode = modes.mode("boxed")
    for pid in hardened.grader_pids():
        os.kill(pid, signal.SIGKILL)
    grade = hardened.grade_texts([GradeItem(text="\\boxed{3(a+1)}", gold="3a+3")])[0]
    assert grade.verdict is Verdict.CORRECT
