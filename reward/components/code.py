"""The code reward: which part of a response is run, against which tests, and what that earns.

It is off unless the config names it: ``reward.components=[{name: code}]``. The program is the last
fenced code block of the response after its thoughts; the tests are a column of the row's
``extra``, as JSON text or plain data, in one of the forms that data sets use::

    ["assert f(2) == 4", "assert f(3) == 9"]                  each run after the program
    [{"input": "1 2\\n", "output": "3\\n"}, …]                  standard input and output
    {"inputs": ["1 2\\n", …], "outputs": ["3\\n", …]}           the same (APPS, TACO)
    {"inputs": [[1, 2], …], "outputs": [3, …], "fn_name": "add"}  a function's arguments and result
    {"test_cases": […]}                                        any of these (open-r1)

A program is only ever run in a sandbox (:mod:`tandem.reward.sandbox.sandbox`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...common.records import Verdict
from ..reading import extraction
from .registry import Graded, register

MAX_PROGRAM = 100_000
"""Length of the longest program that is run, in characters."""
MAX_TESTS = 1_000
"""Largest number of tests that are run for one row."""
Sandbox = Literal["auto", "namespaces", "bubblewrap", "none, I trust what the model writes"]
# Possessive: of a block that nothing closes, each shorter first line would read all of the rest once more.
_FENCE = re.compile(
    r"^[ \t]*+```[ \t]*+(?P<language>[\w+.#-]*+)[^\n]*+\n(?P<code>.*?)^[ \t]*+```", re.M | re.S
)


def last_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The last closed code block in one of these languages; where there is none, the last without a language.

    A program is often followed by what it prints, in a block of its own.

    >>> last_block("```python\\nx = 1\\n```\\nso\\n```\\n1\\n```", ("python",))
    'x = 1\\n'
    """
    named = unnamed = None
    for match in _FENCE.finditer(text):
        language = match.group("language").lower()
        if language in languages:
            named = match.group("code")
        elif not language:
            unnamed = match.group("code")
    return unnamed if named is None else named


def read_tests(given: Any) -> list[list[str]]:
    """Tests as ``["assert", code]``, ``["io", input, output]`` or ``["call", name, arguments, result]``.

    Arguments and results are JSON text. Raises a :class:`ValueError` that says what is wrong.
    """
    try:
        return _read_tests(given)
    except RecursionError:
        raise ValueError("the tests are nested too deeply") from None


def _read_tests(given: Any) -> list[list[str]]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ValueError("the tests aren't JSON") from None
    if isinstance(given, Mapping):
        if "test_cases" in given:
            return _read_tests(given["test_cases"])
        if "inputs" in given and "outputs" in given:
            inputs, outputs = given["inputs"], given["outputs"]
            if not isinstance(inputs, list) or not isinstance(outputs, list):
                raise ValueError("inputs and outputs aren't lists")
            if len(inputs) != len(outputs):
                raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
            name = given.get("fn_name")
            given = [
                {"input": i, "output": o, "fn_name": name}
                for i, o in zip(inputs, outputs, strict=True)
            ]
        else:
            raise ValueError("the tests have neither test_cases nor inputs and outputs")
    if not isinstance(given, list) or not given or len(given) > MAX_TESTS:
        raise ValueError(f"the tests aren't a list of 1 to {MAX_TESTS}")
    return [_test(one) for one in given]


def _test(one: Any) -> list[str]:
    if isinstance(one, str):
        return ["assert", one]
    if not isinstance(one, Mapping) or "input" not in one or "output" not in one:
        raise ValueError(f"a test is neither code nor input and output: {one!r:.80}")
    name = one.get("fn_name")
    if name:
        if not str(name).isidentifier():
            raise ValueError(f"fn_name={name!r:.40} isn't a name")
        return ["call", str(name), json.dumps(one["input"]), json.dumps(one["output"])]
    return ["io", _lines(one["input"]), _lines(one["output"])]


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A sample that is ready to run, or its verdict if there is nothing to run."""

    payload: list[Any] | None = None
    """The request for a runner."""
    program: str | None = None
    """The program that will be run."""
    verdict: Verdict = Verdict.UNPARSABLE
    """The verdict if there is nothing to run."""
    value: float | None = 0.0
    """The component's value if there is nothing to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReward:
    """The code reward with its settings; see :func:`code`."""

    tests: str
    pay: Literal["fraction", "all"]
    seconds: float
    total_seconds: float
    memory_mb: int
    sandbox: str

    def has_tests(self, extra: Mapping[str, Any]) -> bool:
        """Whether a row has tests to run."""
        return bool(extra.get(self.tests))

    def prepare(self, sample: Graded) -> Prepared:
        """The request for a sample that has tests."""
        try:
            tests = read_tests(sample.extra[self.tests])
        except (ValueError, TypeError):
            # The row is at fault, not the text.
            return Prepared(verdict=Verdict.GOLD_UNPARSABLE, value=None)
        part = extraction.solution(sample.text, sample.prompt_text)
        program = last_block(part, ("python", "python3", "py")) if part else None
        if program is None or len(program) > MAX_PROGRAM:
            return Prepared()
        stop = self.pay == "all"
        payload = [program, tests, self.seconds, self.total_seconds, self.memory_mb, stop]
        return Prepared(payload=payload, program=program)

    def judge(self, passed: int, total: int) -> tuple[float, Verdict]:
        """Value and verdict of a finished run."""
        whole = passed == total
        value = passed / total if self.pay == "fraction" else float(whole)
        return value, Verdict.CORRECT if whole else Verdict.WRONG

    @staticmethod
    def trial() -> list[Any]:
        """A request that any working sandbox answers."""
        return ["x = 6 * 7", [["assert", "assert x == 42"]], 10.0, 10.0, 512, True]


@register("code", place="sandbox")
def code(
    tests: str = "tests",
    pay: Literal["fraction", "all"] = "fraction",
    seconds: float = 5.0,
    total_seconds: float = 30.0,
    memory_mb: int = 512,
    sandbox: Sandbox = "auto",
) -> CodeReward:
    """Share of the row's tests that the response's last code block passes (open-r1: 5 s each).

    Args:
        tests: key of the row's ``extra`` that holds the tests; rows without it have no value here.
        pay: ``fraction`` for the share of the tests; ``all`` for 1 if all pass, else 0.
        seconds: time limit of one test; a test that takes longer has failed.
        total_seconds: time limit of all tests of a program; tests that are left have failed.
        memory_mb: address space of the program, MiB.
        sandbox: ``auto`` takes namespaces, else bubblewrap, and refuses to start if neither
            works. Only the last choice, written out in full, runs programs without a sandbox.
    """
    if not 0 < seconds <= total_seconds:
        raise ValueError(f"seconds={seconds} should be above 0, and at most total_seconds")
    if memory_mb < 64:
        raise ValueError(f"memory_mb={memory_mb} is too little for Python: at least 64")
    return CodeReward(
        tests=tests,
        pay=pay,
        seconds=seconds,
        total_seconds=total_seconds,
        memory_mb=memory_mb,
        sandbox=sandbox,
    )
