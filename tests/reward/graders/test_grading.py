"""Real grader processes: verdicts, deadlines, deaths, replacements, confinement."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.errors import TandemError
from tandem.common.records import FinishReason, Verdict
from tandem.reward.graders import grader_processes, verdicts
from tandem.reward.graders.canary import CANARY, Known
from tandem.reward.graders.grader_processes import GraderProcesses
from tandem.reward.graders.requests import Outcome
from tandem.reward.grading import GradeItem, Grader


@pytest.fixture(scope="module")
def mistreated() -> Iterator[Grader]:
    """Two graders for all tests that kill or hang some."""
    with Grader(RewardConfig(deadline_seconds=2.0, memory_mb=600)) as made:
        made.canary()
        yield made


@pytest.fixture
def own(mistreated: Grader, make: Any) -> Grader:
    """Two live graders, with nothing remembered of other tests."""
    pump_until(mistreated, make, lambda: len(mistreated.grader_pids()) == 2, "two graders")
    mistreated.restarts.clear()
    return mistreated


def pump_until(grader: Grader, make: Any, condition: Any, what: str) -> None:
    def turn() -> bool:
        grader.pump(0.05)
        return bool(condition())

    make.until(turn, what)


def begun(grader: Grader, make: Any, answer: str, gold: str = "x^2+1") -> list[Any]:
    """Starts grading one answer; the list holds its group when it is done."""
    done: list[Any] = []
    text = f"</think>\\boxed{{{answer}}}"
    grader.begin_group(make.group([text], gold=gold), done.append)
    return done


def kill_graders(grader: Grader, make: Any) -> list[int]:
    """Kills all graders, the one that has the request among them, and waits till that is seen."""
    pids = grader.grader_pids()
    before = len(grader.restarts)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    pump_until(grader, make, lambda: len(grader.restarts) >= before + len(pids), "the deaths")
    return pids


# Formulas in j are compared in a grader process: the letter may be an imaginary unit.

# --- verdicts ---------------------------------------------------------------------------------


def test_a_group_is_graded_whole(grader: Grader, make: Any) -> None:
    texts = ["</think> \\boxed{2}", "</think> \\boxed{3}", "</think> I don't know", "2"]
    graded = grader.grade_group(make.group(texts))
    assert [s.verdict for s in graded.samples] == [
        Verdict.CORRECT,
        Verdict.WRONG,
        Verdict.WRONG,
        Verdict.UNPARSABLE,
    ]
    first = graded.samples[0]
    assert (first.reward, first.extracted, first.grader) == (1.0, "2", grader.name)
    assert first.components == {"accuracy": 1.0, "format": 0.0}
    assert first.text == texts[0]


def test_an_unreadable_gold_answer_leaves_no_reward(grader: Grader, make: Any) -> None:
    grade = grader.grade_texts([make.item("5", "")])[0]
    assert (grade.verdict, grade.reward) == (Verdict.GOLD_UNPARSABLE, None)


def test_a_truncated_text_is_not_searched_for_numbers(grader: Grader) -> None:
    item = GradeItem(text="</think> so 5", gold="5", finish_reason=FinishReason.LENGTH)
    assert grader.grade_texts([item])[0].verdict is Verdict.UNPARSABLE


def test_the_same_question_is_asked_once(grader: Grader, make: Any) -> None:
    before = grader.stats()["to_process"]
    items = [make.item("3(j+7)", "3j+21")] * 5
    grades = grader.grade_texts(items)
    assert all(g.verdict is Verdict.CORRECT for g in grades)
    assert [g.cached for g in grades] == [False, True, True, True, True]
    assert grader.grade_texts(items[:1])[0].cached
    assert grader.stats()["to_process"] == before + 1


def test_grading_works_from_any_thread(grader: Grader, make: Any) -> None:
    found: list[Verdict] = []

    def work() -> None:
        found.extend(g.verdict for g in grader.grade_texts([make.item("5(j+1)", "5j+5")]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert found == [Verdict.CORRECT]


# --- hangs ------------------------------------------------------------------------------------


def test_a_hang_is_a_timeout_and_the_others_are_graded(own: Grader, make: Any) -> None:
    pids = own.grader_pids()
    items = [make.item(make.hang, f"{n}x+1") for n in range(2, 4)]
    items += [make.item(f"{n}(j+2)", f"{n}j+{2 * n}") for n in range(2, 22)]
    grades = own.grade_texts(items)
    assert [g.verdict for g in grades[:2]] == [Verdict.TIMEOUT] * 2
    assert [g.verdict for g in grades[2:]] == [Verdict.CORRECT] * 20
    # The deadline bounds each, whatever else waited.
    assert all(g.seconds < 10.0 for g in grades)
    assert [r.reason for r in own.restarts] == ["deadline"] * 2
    # Killed, replaced, and reaped: no zombie stays.
    make.until(lambda: not any(psutil.pid_exists(p) for p in pids), "the killed graders' end")


def test_a_timeout_is_cached(own: Grader, make: Any) -> None:
    item = make.item(make.hang, "7x+1")
    assert [g.verdict for g in own.grade_texts([item] * 4)] == [Verdict.TIMEOUT] * 4
    assert own.grade_texts([item])[0].cached
    assert len(own.restarts) == 1


def test_a_memory_blow_up_is_its_texts_own_doing(make: Any) -> None:
    config = RewardConfig(deadline_seconds=5.0, memory_mb=100, graders=1, timeout_pays=-0.5)
    with Grader(config) as grader:
        grade = grader.grade_texts([make.item(make.hang, "3x+1")])[0]
        assert grade.verdict in (Verdict.MEMORY, Verdict.TIMEOUT)
        assert grade.reward == -0.5
        after = grader.grade_texts([make.item("2(j+3)", "2j+6")])[0]
        assert after.verdict is Verdict.CORRECT


# --- deaths -----------------------------------------------------------------------------------


def test_an_idle_grader_that_is_killed_is_noticed_and_replaced(own: Grader, make: Any) -> None:
    victim = own.grader_pids()[0]
    os.kill(victim, signal.SIGKILL)
    pump_until(own, make, lambda: own.restarts, "the restart")
    restart = own.restarts[0]
    assert (restart.kind, restart.pid, restart.reason) == ("grader", victim, "killed by signal 9")
    pump_until(own, make, lambda: len(own.grader_pids()) == 2, "the new grader")
    assert victim not in own.grader_pids()


def test_a_grader_killed_in_mid_request_costs_one_retry(own: Grader, make: Any) -> None:
    done = begun(own, make, make.hang, "4x+1")
    kill_graders(own, make)
    pump_until(own, make, lambda: done, "the second attempt's outcome")
    # Tried again, where it runs into its deadline like any hang.
    assert done[0].samples[0].verdict is Verdict.TIMEOUT
    assert [r.reason for r in own.restarts] == [*["killed by signal 9"] * 2, "deadline"]


def test_a_request_whose_graders_die_twice_is_crashed_and_unpaid(own: Grader, make: Any) -> None:
    cached = own.stats()["cache_size"]
    done = begun(own, make, make.hang, "5x+1")
    kill_graders(own, make)
    pump_until(own, make, lambda: len(own.grader_pids()) == 2, "new graders")
    kill_graders(own, make)
    pump_until(own, make, lambda: done, "the verdict")
    assert done[0].samples[0].verdict is Verdict.CRASHED
    assert done[0].samples[0].reward is None
    # A crash isn't cached: the next one to ask is graded.
    assert own.stats()["cache_size"] == cached


def test_a_zygote_that_is_killed_takes_its_graders_along_and_is_replaced(
    own: Grader, make: Any
) -> None:
    zygote, graders = own.zygote_pid(), own.grader_pids()
    assert zygote is not None
    done = begun(own, make, make.hang, "6x+1")
    os.kill(zygote, signal.SIGKILL)
    # The busy one too: it would run on till its CPU limit, some seconds later.
    make.until(lambda: not any(_alive(p) for p in graders), "the old graders' end", 2.0)
    pump_until(own, make, lambda: done, "the second attempt's outcome")
    assert done[0].samples[0].verdict is Verdict.TIMEOUT
    assert (own.restarts[0].kind, own.restarts[0].pid) == ("zygote", zygote)
    pump_until(own, make, lambda: len(own.grader_pids()) == 2, "two new graders")
    assert own.zygote_pid() != zygote


def test_a_zygote_that_dies_twice_of_one_request_is_replaced_by_one(make: Any) -> None:
    others = set(psutil.Process().children())
    processes = GraderProcesses(1, deadline=30.0, memory_mb=600)
    done: list[Any] = []
    killed: list[Any] = []

    def ask_once_more(outcome: Outcome) -> None:
        done.append(outcome)
        processes.submit("compare", ["2(j+1)", "2j+2"], done.append)

    def until(condition: Any, what: str) -> None:
        make.until(lambda: processes.poll(0.05) or condition(), what)

    def busy() -> bool:
        return bool(processes.pids()) and any(s.request for s in processes._slots.values())

    processes.submit("compare", [make.hang, "8x+1"], ask_once_more)
    try:
        for _ in range(2):
            until(busy, "the request at a grader")
            killed.append(processes.zygote_pid)
            os.kill(killed[-1], signal.SIGKILL)
            until(lambda: processes.zygote_pid not in killed, "another zygote")
        assert [child.pid for child in set(psutil.Process().children()) - others] == [
            processes.zygote_pid
        ]
        until(lambda: len(done) == 2, "the second request's outcome")
        assert [outcome.verdict for outcome in done] == [Verdict.CRASHED, Verdict.CORRECT]
    finally:
        processes.close()


def test_a_zygote_whose_pool_died_while_it_started_ends_quietly() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    zygote = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "tandem.reward.graders.zygote"),
            str(theirs.fileno()),
            json.dumps(
                {"memory_mb": 1024, "parent": os.getpid(), "functions": [], "sandbox": None}
            ),
        ],
        stderr=subprocess.PIPE,
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    ours.close()
    assert zygote.communicate(timeout=60) == (None, b"")
    assert zygote.returncode == 0


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_close_leaves_nothing_behind(make: Any) -> None:
    grader = Grader(RewardConfig())
    grader.canary()
    pids = [*grader.grader_pids(), grader.zygote_pid()]
    assert len(pids) == 3
    grader.close()
    assert not any(_alive(p) for p in pids if p)


def test_plain_answers_start_no_process(make: Any) -> None:
    with Grader(RewardConfig()) as grader:
        assert grader.grade_texts([make.item("4", "4")])[0].verdict is Verdict.CORRECT
        assert grader.zygote_pid() is None


# --- confinement ------------------------------------------------------------------------------

ATTACKS = [
    "__import__('os').system('touch {}')",
    "\\text{{__import__('os').system('touch {}')}}",
    "().__class__.__base__.__subclasses__()",
    "exec(\"open('{}','w')\")",
    "f(x) = open('{}', 'w')",
    "\\input{{|touch {}}}",
    "lambda: open('{}','w').write('x')",
    "S('open(chr(47)+\\'{}\\', chr(119))')",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_planted_code_never_runs(grader: Grader, make: Any, tmp_path: Path, attack: str) -> None:
    os.chmod(tmp_path, 0o777)
    marker = tmp_path / "marker"
    answer = attack.format(marker) if "{}" in attack else attack
    grades = grader.grade_texts(
        [
            make.item(answer, "x+1"),
            make.item(f"${answer}$", "\\frac{1}{2}"),
            # As a gold answer too: data sets and traces are input as well.
            make.item("x+1", answer),
            GradeItem(text=f"</think> The answer is {answer}", gold="x+1"),
        ]
    )
    assert all(g.verdict is not Verdict.CORRECT for g in grades)
    assert not marker.exists()


def test_graders_hold_no_secret_and_no_descriptor_of_ours(own: Grader, tmp_path: Path) -> None:
    for pid in own.grader_pids():
        environment = (Path("/proc") / str(pid) / "environ").read_bytes()
        names = {entry.partition(b"=")[0].decode() for entry in environment.split(b"\0") if entry}
        assert names <= {
            "PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG",
            "SYMPY_GROUND_TYPES", "MPMATH_NOGMPY", "PYTHONHASHSEED",
            "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        }  # fmt: skip
        limits = (Path("/proc") / str(pid) / "limits").read_text()
        assert f"Max address space         {600 << 20}" in limits
        assert "Max file size             0" in limits
        assert "Max core file size        0" in limits
        assert "Max open files            16" in limits


# --- the canary -------------------------------------------------------------------------------


def test_the_canary_passes_with_working_graders(grader: Grader) -> None:
    grader.canary(CANARY)


@pytest.mark.parametrize(
    "broken",
    [
        Known(answer="2(x+1)", gold="3x+2", correct=True),
        Known(answer="2(x+1)", gold="2x+2", correct=False),
        Known(answer="41", gold="42", correct=True),
    ],
)
def test_the_canary_refuses_a_grader_that_is_wrong(grader: Grader, broken: Known) -> None:
    with pytest.raises(TandemError, match="the grader is broken"):
        grader.canary((*CANARY, broken))


def test_graders_that_cannot_start_are_told_of(make: Any) -> None:
    # An address space too small for the fork's first allocation.
    with Grader(RewardConfig(memory_mb=1, graders=1)) as grader:
        with pytest.raises(TandemError, match=r"reward\.memory_mb=1"):
            grader.canary()


def test_graders_that_import_for_too_long_are_told_of(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grader_processes, "START_SECONDS", 0.1)
    processes = GraderProcesses(1, deadline=3.0, memory_mb=600, functions=["json:dumps"])
    told = r"still imported after 0\.1 s .*json:dumps.*do less"
    try:
        processes.start()
        with pytest.raises(TandemError, match=told):
            make.until(lambda: processes.poll(0.05), "the third end")
    finally:
        processes.close()


def test_an_unknown_component_is_refused_before_anything_starts() -> None:
    with pytest.raises(TandemError, match="isn't one of"):
        Grader(RewardConfig(components=(ComponentConfig(name="nope"),)))


def test_a_verdict_does_not_outlive_the_cache(
    make: Any, monkeypatch: pytest.MonkeyPatch, grader: Grader
) -> None:
    monkeypatch.setattr(verdicts, "CACHED_VERDICTS", 1)
    first, second = make.item("7(j+1)", "7j+7"), make.item("8(j+1)", "8j+8")
    # One after the other: verdicts of one call are cached in the order in which graders finish.
    grader.grade_texts([first])
    grader.grade_texts([second])
    assert not grader.grade_texts([first])[0].cached


AS_LONELY_ROOT = """
from tandem.common.config import RewardConfig
from tandem.reward.grading import Grader
with Grader(RewardConfig(graders=1)) as grader:
    grader.canary()
    print(*grader.limits, sep="\\n")
"""


def test_root_who_can_become_no_other_user_grades_and_says_so() -> None:
    """As in a container without capabilities; here in a user namespace that knows no user but root."""
    alone = ["unshare", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"]).returncode:
        pytest.skip("no user namespaces here")
    ran = subprocess.run(
        [*alone, sys.executable, "-c", AS_LONELY_ROOT], capture_output=True, text=True
    )
    assert "as root, who can become no other user here" in ran.stdout.splitlines(), ran.stderr
