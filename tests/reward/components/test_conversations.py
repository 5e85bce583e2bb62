"""Reward functions in the form that TRL's tutorials have for chat data run without a change."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.errors import ConfigError
from tandem.common.records import PROMPT_MESSAGES, Verdict
from tandem.reward.components.registry import Graded
from tandem.reward.graders.call_forms import form_of
from tandem.reward.grading import GradeItem, Grader

MODULE = r"""
import functools, re
from typing import Dict, List, Optional

import numpy as np
from math_verify import parse, verify

# --- as in a tutorial for chat data ---

def format_reward(completions, **kwargs):
    pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content, re.DOTALL) else 0.0 for content in contents]

def accuracy_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    rewards = []
    for content, sol in zip(contents, solution):
        gold = parse(sol)
        rewards.append(float(verify(gold, parse(content))) if gold else None)
    return rewards

def typed(completions: List[List[Dict[str, str]]], log_extra=None, **kwargs) -> List[Optional[float]]:
    assert log_extra is None
    return [float(len(c)) for c in completions]

def asked(prompts, completions, **kwargs):
    return [float("system" in [m["role"] for m in p] and c[0]["role"] == "assistant" and
            p[-1]["content"] == "1+1=?" and "content" in p[-1]) for p, c in zip(prompts, completions)]

# --- in other forms ---

def plain(completions, prompts, **kwargs):
    return [len(text) + len(prompt) for text, prompt in zip(completions, prompts)]

def _inner(message):
    return message["content"]

def indirect(completions, **kwargs):
    return [float(len(_inner(c[0]))) for c in completions]

class Weighted:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, completions, **kwargs):
        return [self.factor * len(c[0]["content"]) for c in completions]

weighted = Weighted(10)
partial = functools.partial(Weighted(1).__call__, unused=1)

def array(completions, **kwargs):
    return np.array([1.5 if "a" in text else np.nan for text in completions], dtype=np.float32)

def scalars(completions, **kwargs):
    return [np.float32(0.5) for _ in completions]

def column(completions, **kwargs):
    return np.zeros((len(completions), 1))

def logs(completions, log_metric, log_extra, **kwargs):
    log_metric("mean", 1.0)
    log_extra("column", [1] * len(completions))
    return [1.0] * len(completions)

def wants_state(completions, trainer_state):
    return [1.0] * len(completions)

def takes_state(completions, **kwargs):
    return [float(kwargs["trainer_state"].global_step)] * len(completions)

def hidden(completions, **kwargs):
    return [len(completion[0]["".join(("con", "tent"))]) for completion in completions]
"""

GOOD = (
    *("format_reward", "accuracy_reward", "typed", "asked", "plain", "indirect", "weighted"),
    *("partial", "array", "scalars", "logs"),
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "tutorial_rewards.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield folder


def own(name: str, **changes: Any) -> ComponentConfig:
    return ComponentConfig(name=f"tutorial_rewards:{name}", **changes)


@pytest.fixture(scope="module")
def grader(module: Path) -> Iterator[Grader]:
    parts = tuple(own(name) for name in GOOD)
    with Grader(RewardConfig(components=parts, graders=1, deadline_seconds=20.0)) as made:
        yield made


def items(*texts: str, **changes: Any) -> list[GradeItem]:
    fields: dict[str, Any] = {
        "gold": "1/2",
        "prompt_text": "<|im_start|>user\n1+1=?",
        "extra": {"solution": "so it is $\\boxed{\\frac{1}{2}}$", PROMPT_MESSAGES: MESSAGES},
    }
    return [GradeItem(text=text, group="g", **{**fields, **changes}) for text in texts]


def values(grader: Grader, name: str, given: list[GradeItem]) -> list[float | None]:
    return [g.components[f"tutorial_rewards:{name}"] for g in grader.grade_texts(given)]


def test_the_functions_of_a_tutorial_pay_what_they_pay_there(grader: Grader) -> None:
    right = "<think>half</think> <answer>$\\frac{2}{4}$</answer>"
    given = items(right, "no tags, and $\\boxed{3}$")
    assert values(grader, "format_reward", given) == [1.0, 0.0]
    assert values(grader, "accuracy_reward", given) == [1.0, 0.0]


def test_a_solution_that_cannot_be_parsed_is_left_out_as_in_the_tutorial(grader: Grader) -> None:
    extra = {"solution": "", PROMPT_MESSAGES: MESSAGES}
    assert values(grader, "accuracy_reward", items("$1$", extra=extra)) == [None]


def test_prompts_are_the_messages_that_the_prompt_was_rendered_from(grader: Grader) -> None:
    assert values(grader, "asked", items("a")) == [1.0]
    # Without them the rendered prompt is one user's message.
    assert values(grader, "asked", items("a", extra={})) == [0.0]


def test_a_function_for_texts_gets_texts_beside_one_for_conversations(grader: Grader) -> None:
    assert values(grader, "plain", items("abc")) == [3.0 + len("<|im_start|>user\n1+1=?")]
    assert values(grader, "typed", items("abc")) == [1.0]


@pytest.mark.parametrize(("name", "value"), [("indirect", 3.0), ("weighted", 30.0), ("partial", 3)])
def test_helpers_objects_and_partials_are_recognised(
    grader: Grader, name: str, value: float
) -> None:
    assert values(grader, name, items("abc")) == [value]


def test_arrays_and_their_scalars_are_numbers_and_nan_in_an_array_is_none(grader: Grader) -> None:
    assert values(grader, "array", items("a", "b")) == [1.5, None]
    assert values(grader, "scalars", items("a", "b")) == [0.5, 0.5]


def test_what_is_logged_is_accepted(grader: Grader) -> None:
    assert values(grader, "logs", items("a")) == [1.0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("column", r"it returned 1 rewards for the tokens of completion 0"),
        ("wants_state", "'trainer_state', which can't be given: no trainer runs beside"),
        ("takes_state", "'trainer_state', which can't be given"),
        ("hidden", "completions were given as text: if that is wrong, set form: conversation"),
    ],
)
def test_what_cannot_be_given_is_told(module: Path, name: str, told: str) -> None:
    with Grader(RewardConfig(components=(own(name),), graders=1)) as grader:
        grades = grader.grade_texts(items("a"))
        assert grades[0].verdict is Verdict.CRASHED
        assert re.search(told, grader.last_error), grader.last_error


def test_the_form_can_be_set(module: Path) -> None:
    parts = (own("hidden", form="conversation"), own("plain", form="conversation"))
    with Grader(RewardConfig(components=parts, graders=1)) as grader:
        assert values(grader, "hidden", items("abc")) == [3.0]
        # One message of completion and two of the prompt.
        assert values(grader, "plain", items("abc")) == [3.0]


def test_a_form_on_a_builtin_component_is_refused() -> None:
    part = ComponentConfig(name="accuracy", form="conversation")
    with pytest.raises(ConfigError, match="is for functions of your own"):
        Grader(RewardConfig(components=(part,)))


@pytest.mark.parametrize(
    ("annotation", "form"),
    [
        ("list[str]", "text"),
        ("list[list[dict[str, str]]]", "conversation"),
        ("List[List[Dict[str, Any]]]", "conversation"),
        ("Sequence[Messages]", "conversation"),
        ("list[str] | list[list[dict[str, str]]]", "text"),
        ("list", "text"),
    ],
)
def test_an_annotation_says_the_form_and_the_code_settles_the_rest(
    annotation: str, form: str
) -> None:
    def function(completions):  # type: ignore[no-untyped-def]
        return completions

    function.__annotations__["completions"] = annotation
    assert form_of(function) == form


@pytest.mark.parametrize("damaged", ["text", [], [{"role": "user"}], [{"role": 1, "content": "a"}]])
def test_a_column_with_the_name_of_the_messages_is_no_prompt(damaged: Any) -> None:
    sample = Graded(
        text="t", verdict=Verdict.WRONG, prompt_text="q", extra={PROMPT_MESSAGES: damaged}
    )
    assert sample.messages == [{"role": "user", "content": "q"}]
