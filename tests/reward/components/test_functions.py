"""Reward functions of a user's own: called in a grader process, in the form that TRL users know."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.errors import ConfigError
from tandem.common.records import Verdict
from tandem.reward.components.functions import columns
from tandem.reward.components.registry import Graded
from tandem.reward.graders.user_functions import call
from tandem.reward.grading import GradeItem, Grader

MODULE = """
import os, subprocess, sys, time

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def from_columns(completions, prompts, ground_truth, level, scale):
    return [scale * (text == gold) + len(prompt) + grade
            for text, prompt, gold, grade in zip(completions, prompts, ground_truth, level)]

def tokens(completion_ids, **columns):
    return [len(ids) for ids in completion_ids]

def each_token(completion_ids, **columns):
    return [[float(token > 5) for token in ids] for ids in completion_ids]

def too_few(completion_ids, **columns):
    return [[1.0] for ids in completion_ids]

def above_the_mean(completions, **columns):
    mean = sum(map(len, completions)) / len(completions)
    return [float(len(text) > mean) for text in completions]

def sometimes(completions, **columns):
    return [None if "?" in text else 1.0 for text in completions]

def hostile(completions, **columns):
    for text in completions:
        if "hang" in text:
            while True:
                pass
        if "sleep" in text:
            time.sleep(1000)
        if "raise" in text:
            raise KeyError("a column of mine")
        if "leave" in text:
            os._exit(3)
        if "eat" in text:
            bytearray(1 << 40)
    return [1.0] * len(completions)

def prints(completions, **columns):
    print("to the terminal", file=sys.stderr, flush=True)
    print("to the terminal", flush=True)
    return [1.0] * len(completions)

def forks(completions, **columns):
    if "fork" in completions[0]:
        os.fork()
    return [float(len(text)) for text in completions]

def starts(completions, **columns):
    if "start" in completions[0]:
        subprocess.run(["sleep", completions[0].split()[1]])
    return [1.0] * len(completions)

def noted(completions, **columns):
    if "note" in completions[0]:
        raise ValueError("noted")
    return [0.5] * len(completions)

def short(completions, **columns):
    return [1.0]

def not_a_number(completions, **columns):
    return [float("nan")] * len(completions)

def by_text(completions, **columns):
    return {n: 0.5 for n, text in enumerate(completions)}

def at_once(completions, **columns):
    return set(range(len(completions)))

def wants_more(completions, difficulty):
    return [1.0] * len(completions)

def where(completions, **columns):
    return [float(os.getpid())] * len(completions)

def secrets(completions, **columns):
    return [float("TANDEM_SECRET" in os.environ)] * len(completions)

async def later(completions, **columns):
    return [2.0] * len(completions)

class Scorer:
    def __call__(self, completions, **columns):
        return [3.0] * len(completions)

instance = Scorer()
"""

Make = Callable[..., Grader]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(MODULE)
    (folder / "broken_rewards.py").write_text("import nothing_of_that_name\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("TANDEM_SECRET", "s3cret")
        yield folder


def own(name: str, **changes: Any) -> ComponentConfig:
    return ComponentConfig(name=f"own_rewards:{name}", **changes)


PLAIN = ("length", "tokens", "above_the_mean", "sometimes", "where", "secrets", "later", "instance")


@pytest.fixture(scope="module")
def plain(module: Path) -> Iterator[Grader]:
    """All well-behaved functions, recorded side by side."""
    parts = [own(name) for name in PLAIN]
    parts.append(own("from_columns", params={"scale": 10}))
    with Grader(RewardConfig(components=tuple(parts), graders=1)) as grader:
        yield grader


@pytest.fixture(scope="module")
def hostile(module: Path) -> Iterator[Grader]:
    config = RewardConfig(
        components=(
            own("hostile"),
            own("noted", weight=0.0, scope="group"),
            ComponentConfig(name="accuracy"),
        ),
        deadline_seconds=0.5,
        memory_mb=600,
        timeout_pays=-0.25,
    )
    with Grader(config) as grader:
        yield grader


def items(*texts: str, **changes: Any) -> list[GradeItem]:
    fields: dict[str, Any] = {
        "gold": "2",
        "prompt_text": "1+1=?",
        "extra": {"level": 5},
        "tokens": np.arange(7, dtype=np.int32),
    }
    return [GradeItem(text=text, group="g", **{**fields, **changes}) for text in texts]


def values(grader: Grader, name: str, given: list[GradeItem]) -> list[float | None]:
    return [g.components[f"own_rewards:{name}"] for g in grader.grade_texts(given)]


# --- what a function gets and gives ----------------------------------------------------------


def test_a_function_pays_what_it_returns_for_each_completion(plain: Grader) -> None:
    assert values(plain, "length", items("a", "bcd")) == [1.0, 3.0]


def test_it_gets_the_columns_that_it_names_and_its_params(plain: Grader) -> None:
    assert values(plain, "from_columns", items("2", "3")) == [10 + 5 + 5, 5 + 5]


@pytest.mark.parametrize("name", ["verdict", "extracted", "finish_reason"])
def test_what_the_grader_says_is_replaced_by_no_column_and_no_parameter(name: str) -> None:
    sample = Graded(text="2", verdict=Verdict.WRONG, extracted="3", extra={name: "of the data"})
    said = {"verdict": ["wrong"], "extracted": ["3"], "finish_reason": ["stop"]}
    assert columns([sample])[name] == said[name]
    part = own("length", params={name: "of the config"})
    with pytest.raises(ConfigError, match=f"params.{name} has the name of a column"):
        Grader(RewardConfig(components=(part,)))


def test_it_gets_token_ids_where_they_are_known(plain: Grader) -> None:
    assert values(plain, "tokens", items("a", "b")) == [7.0, 7.0]


def test_it_may_pay_single_tokens_whose_sum_is_its_value(module: Path) -> None:
    parts = (own("each_token", weight=2.0), ComponentConfig(name="accuracy"))
    with Grader(RewardConfig(components=parts, graders=1)) as grader:
        (one,) = grader.grade_texts(items("\\boxed{2}"))
    assert (one.components["own_rewards:each_token"], one.reward) == (1.0, 3.0)
    assert one.token_rewards == [0, 0, 0, 0, 0, 0, 2]


def test_single_tokens_of_long_completions_are_paid_too(module: Path) -> None:
    with Grader(RewardConfig(components=(own("each_token"),), graders=1)) as grader:
        ids = np.arange(30_000, dtype=np.int32)
        grades = grader.grade_texts(items(*"abcdefgh", tokens=ids[:4000]))
        assert [grade.reward for grade in grades] == [3994.0] * 8
        assert [len(grade.token_rewards or ()) for grade in grades] == [4000] * 8
        (one,) = grader.grade_texts(items("a", tokens=ids))
        assert (one.reward, len(one.token_rewards or ())) == (29_994.0, 30_000)
        assert (grader.restarts, grader.stats()["function_calls"]) == ([], 2)


def test_one_call_has_the_whole_group(plain: Grader) -> None:
    assert values(plain, "above_the_mean", items("a", "bb", "cccccc")) == [0.0, 0.0, 1.0]


def test_a_group_of_the_pool_is_one_call_too(plain: Grader, make: Any) -> None:
    group = make.group(["a", "bb", "cccccc"], extra={"level": 1})
    graded = plain.grade_group(group)
    found = [s.components["own_rewards:above_the_mean"] for s in graded.samples]
    assert found == [0.0, 0.0, 1.0]


def test_an_awaitable_and_an_object_with_call_are_functions_too(plain: Grader) -> None:
    assert values(plain, "later", items("a")) == [2.0]
    assert values(plain, "instance", items("a")) == [3.0]


def test_an_object_that_can_not_be_hashed_is_a_function_too() -> None:
    @dataclass
    class Scorer:
        paid: float

        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [self.paid * len(text) for text in completions]

    given = {"prompts": ["1+1=?"], "completions": ["ab"]}
    for paid in (1.0, 2.0):
        assert call(Scorer(paid), given, "auto") == [2 * paid]


def test_texts_of_megabytes_arrive_whole(plain: Grader) -> None:
    texts = [letter * 1_000_000 for letter in "abcd"]
    assert values(plain, "length", items(*texts)) == [1e6] * 4


def test_it_runs_in_a_grader_process_without_our_secrets(plain: Grader) -> None:
    (pid,) = values(plain, "where", items("a"))
    assert pid in plain.grader_pids()
    assert values(plain, "secrets", items("a")) == [0.0]


def test_the_names_that_datasets_have_for_a_gold_answer_are_all_there() -> None:
    sample = Graded(text="t", verdict=Verdict.WRONG, gold="7", extra={"solution": "mine"})
    found = columns([sample])
    assert (found["gold"], found["ground_truth"], found["solution"]) == (["7"], ["7"], ["mine"])
    assert "completion_ids" not in found


def test_a_reward_that_asks_for_no_answer_needs_no_gold(plain: Grader) -> None:
    (grade,) = plain.grade_texts(items("a", gold=""))
    assert grade.reward is not None
    # A verdict that took the sample out of its baseline would take its reward along.
    assert not grade.verdict.leaves_baseline


# --- what it may do wrong --------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["hang", "sleep", "eat"])
def test_a_text_that_hangs_a_function_is_paid_as_wrong_and_costs_its_group_nothing(
    hostile: Grader, doing: str, make: Any
) -> None:
    before = hostile.grader_pids()
    grades = hostile.grade_texts(items("\\boxed{2}", f"{doing} \\boxed{{2}}", "\\boxed{3}"))
    expected = Verdict.MEMORY if doing == "eat" else Verdict.TIMEOUT
    assert [g.verdict for g in grades] == [Verdict.CORRECT, expected, Verdict.WRONG]
    assert [g.reward for g in grades] == [2.0, -0.25, 1.0]
    assert grades[1].components == {
        "own_rewards:hostile": None,
        "own_rewards:noted": 0.5,
        "accuracy": 1.0,
    }
    gone = [pid for pid in before if pid not in hostile.grader_pids()]
    make.until(
        lambda: not any(psutil.pid_exists(pid) for pid in gone), "the end of a killed grader"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's graders can start processes")
def test_the_fork_of_a_function_answers_no_other_request(module: Path) -> None:
    with Grader(RewardConfig(components=(own("forks"),), graders=1)) as grader:
        # Each has a call of its own, and they wait in line, so that a stray answer would meet the next one.
        texts = ["fork" if n == 3 else "a" * (n + 5) for n in range(100)]
        each = [replace(items(text)[0], group=text) for text in texts]
        assert values(grader, "forks", each) == [float(len(text)) for text in texts]


def test_a_function_may_print_though_our_own_output_is_a_file(
    module: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Grader(RewardConfig(components=(own("prints"),), graders=1)) as grader:
        assert values(grader, "prints", items("a")) == [1.0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's graders can start processes")
def test_what_a_function_starts_ends_with_its_grader(module: Path, make: Any) -> None:
    config = RewardConfig(components=(own("starts"),), graders=1, deadline_seconds=0.5)
    seconds = f"{1000 + os.getpid()}.25"  # No other process sleeps for as long.
    with Grader(config) as grader:
        assert [g.verdict for g in grader.grade_texts(items(f"start {seconds}"))] == [
            Verdict.TIMEOUT
        ]
        make.until(
            lambda: (
                not any(
                    p.info["cmdline"] == ["sleep", seconds]
                    for p in psutil.process_iter(["cmdline"])
                )
            ),
            "the end of what it had started",
        )


@pytest.mark.parametrize("doing", ["raise", "leave"])
def test_what_a_function_raises_is_tried_again_and_then_leaves_the_baseline(
    hostile: Grader, doing: str
) -> None:
    grades = hostile.grade_texts(items("\\boxed{2}", f"{doing} \\boxed{{2}}"))
    assert [g.verdict for g in grades] == [Verdict.CORRECT, Verdict.CRASHED]
    assert [g.reward for g in grades] == [2.0, None]


def test_an_error_is_told_with_its_last_line(
    hostile: Grader, caplog: pytest.LogCaptureFixture
) -> None:
    hostile.grade_texts(items("raise"))
    assert "KeyError: 'a column of mine'" in hostile.last_error
    assert "own_rewards:hostile" in hostile.last_error


def test_a_call_that_compares_its_group_fails_as_a_whole(module: Path) -> None:
    config = RewardConfig(
        components=(own("hostile", scope="group", deadline_seconds=0.5),), graders=1
    )
    with Grader(config) as grader:
        grades = grader.grade_texts(items("a", "hang"))
        assert [g.verdict for g in grades] == [Verdict.TIMEOUT] * 2
        assert [r.reason for r in grader.restarts] == ["deadline"]


def test_a_function_that_only_is_recorded_takes_no_reward_away(hostile: Grader) -> None:
    (grade,) = hostile.grade_texts(items("note \\boxed{2}"))
    assert (grade.verdict, grade.reward) == (Verdict.CORRECT, 2.0)
    assert grade.components["own_rewards:noted"] is None


def test_a_function_that_breaks_the_form_is_a_crash_that_says_how(
    module: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = tuple(
        own(name, scope="group")
        for name in ("short", "not_a_number", "by_text", "at_once", "wants_more", "too_few")
    )
    with Grader(RewardConfig(components=parts, graders=1)) as grader:
        grades = grader.grade_texts(items("a", "b"))
    assert {g.verdict for g in grades} == {Verdict.CRASHED}
    assert "own_rewards:short: ValueError: it returned 1 values for 2 completions" in caplog.text
    assert "it returned 1 rewards for the tokens of completion 0, which are 7" in caplog.text
    assert "own_rewards:not_a_number: ValueError: it returned nan" in caplog.text
    for told in (
        "by_text: TypeError: it returned {0: 0.5, 1: 0.5}",
        "at_once: TypeError: it returned {0, 1}",
    ):
        assert f"own_rewards:{told}, not a list of 2 numbers" in caplog.text
    assert "own_rewards:wants_more: TypeError: it needs the column 'difficulty'" in caplog.text


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("own_rewards:nothing", "has no attribute 'nothing'"),
        ("broken_rewards:f", "No module named 'nothing_of_that_name'"),
        ("own_rewards.MODULE_NAME", "can't be imported"),
        ("own_rewards:os.sep", "isn't a function"),
    ],
)
def test_a_function_that_is_not_there_is_told_of_at_start(
    module: Path, path: str, told: str
) -> None:
    config = RewardConfig(components=(ComponentConfig(name=path),), graders=1)
    with Grader(config) as grader:
        # A pool's process that ends by it isn't started again.
        with pytest.raises(ConfigError, match=told):
            grader.canary()


@pytest.mark.parametrize("path", ["a b:c", ":f", "m:", "rm -rf.x", "m:f()"])
def test_what_is_no_import_path_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError, match="import path"):
        Grader(RewardConfig(components=(ComponentConfig(name=path),)))


def test_params_may_not_hide_a_column() -> None:
    part = ComponentConfig(name="m:f", params={"completions": []})
    with pytest.raises(ConfigError, match="rename it"):
        Grader(RewardConfig(components=(part,)))
