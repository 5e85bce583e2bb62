"""What reads a model's text in the dispatcher takes time that is linear in it, or bounded.

Every mode, component and style, on texts that repeat what their expressions look for. The measure is
how much more CPU time four times the text takes: 4 where it is linear, 16 where it is a square.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import tandem.reward.components.builtin  # noqa: F401 - fills the registry
from tandem.common.records import Verdict
from tandem.reward.answers import comparison, values
from tandem.reward.components import code, programs
from tandem.reward.components.formats import STYLES
from tandem.reward.components.registry import COMPONENTS, Graded, component
from tandem.reward.reading import extraction, modes

PIECES = (
    *("\\boxed{", "\\boxed ", "\\fbox{1}, ", "{", "}", "$", "$ ", "\\(", "\\[", "\\text{a} "),
    *("answer is ", "answer: ", "answer ", "final answer ", "final answer is 1", "#### ", "#### 1"),
    *("<answer>", "</answer>", "<think>", "</think>", "</think> <answer>", "</think><answer>", "<think>\n", "\n</answer>"),
    *("1", "1,", "1,111", "1 ", "-1/", "x = 1, ", " ", "\n", "\t\n", "A ", "(A) or ", "not ", "```\n"),
    *("```python\n", "Step 1:", "\n- ", "a", "é", "\\", "\\frac{1}"),
)  # fmt: skip
SHORT, LONG = 8_000, 32_000
NOISE_SECONDS = 0.05
"""Below it nothing is said of growth."""


def readers() -> dict[str, Callable[[str], object]]:
    found: dict[str, Callable[[str], object]] = {
        "code": lambda text: code.last_block(text, ("python",)),
        "program": programs.program,
        "math_verify_answer": modes.math_verify_answer,
    }
    for name, mode in modes.MODES.items():
        found[f"mode {name}"] = lambda text, mode=mode: mode.read(text, "", False)  # type: ignore[misc]
    made = {name: {"style": name} for name in STYLES}
    made["a pattern"] = {"pattern": ".*?</think>.*?<answer>.*?</answer>"}
    for name, params in made.items():
        _, fits = component("format", params)
        found[f"format {name}"] = lambda text, fits=fits: fits(sample(text))  # type: ignore[misc]
    for name, kind in COMPONENTS.items():
        if kind.place == "dispatcher":
            given = {"cosine": {"max_length": 100}, "mentions": {"words": ["<code>", "x"]}}
            _, value = component(name, given.get(name.split("_")[0], {}))
            found[name] = (
                (lambda text, value=value: value([sample(text)]))  # type: ignore[misc]
                if kind.scope == "group"
                else (lambda text, value=value: value(sample(text)))  # type: ignore[misc]
            )
    return found


def sample(text: str) -> Graded:
    return Graded(text=text, verdict=Verdict.WRONG, prompt_text="<think>")


def seconds(read: Callable[[str], object], text: str) -> float:
    begun = time.process_time()
    read(text)
    return time.process_time() - begun


def hostile(piece: str, length: int) -> list[str]:
    text = (piece * (length // len(piece) + 1))[:length]
    half = length // 2
    # The last is a code block that nothing closes, with a long first line and a long rest.
    return [text, f"</think>{text}", f"```{text[:half]}\n{text[half:]}"]


@pytest.mark.parametrize(("name", "read"), readers().items())
def test_four_times_the_text_takes_little_more_than_four_times_the_time(
    name: str, read: Callable[[str], object]
) -> None:
    for piece in PIECES:
        for short, long in zip(hostile(piece, SHORT), hostile(piece, LONG), strict=True):
            if seconds(read, long) < NOISE_SECONDS:
                continue
            # What is left is slow, or was interrupted.
            long_seconds = min(seconds(read, long) for _ in range(3))
            short_seconds = min(seconds(read, short) for _ in range(3))
            assert long_seconds < NOISE_SECONDS or long_seconds < 8 * short_seconds, piece


def test_an_answer_of_the_longest_kind_is_decided_at_once() -> None:
    by = modes.mode("boxed", tuple_for_set=False)
    answers = [hostile(piece, extraction.MAX_ANSWER)[0] for piece in PIECES]
    for answer in (*answers, f"1{' ' * 1900}end"):
        for gold in ("5", "x+1", "\\{1,2\\}", "A", "even", "3:2", "5\\text{ cm}", "x=5"):
            begun = time.process_time()
            comparison.decide(answer, gold, by)
            values.same(answer, gold)
            # A square of 2,000 is far below; a cube of it would take hours.
            assert time.process_time() - begun < 10.0


def test_a_sentence_of_the_longest_kind_is_read_at_once() -> None:
    for piece in PIECES:
        text = hostile(piece, extraction.MAX_ANSWER - 100)[0]
        begun = time.process_time()
        extraction.anchored(f"the answer is 5{text} words")
        assert time.process_time() - begun < 10.0, piece
