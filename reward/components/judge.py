"""The judge: another model, asked over HTTP what it thinks of a response.

The server has the interface of OpenAI's chat completions (``/v1/chat/completions``): vLLM, SGLang,
llama.cpp and most hosted models do. It is asked about one sample at a time
(:mod:`tandem.reward.servers` does the asking), and its score is read out of its answer by a regular
expression or from a JSON field. Nothing of the answer is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .asking import (
    Asking,
    Question,
    asking,
    clean,
    flag,
    number,
    options_of,
    problem_of,
    response_of,
    text,
    whole,
)
from .registry import Graded, register

PROMPT = """\
Judge how good the following response to a problem is.

# Problem
{problem}

# Response
{response}

# Your task
Consider whether the response is right, complete and clear. Give your reasons in a few sentences, then end \
with one line of the form "Score: N", where N is a whole number from 0 (useless) to 10 (perfect)."""
PATTERN = r"(?i)score[*_]*\s*:[\s*_]*(-?[0-9]+(?:\.[0-9]+)?)"
NAMES = ("problem", "response", "gold")
_PLACES = re.compile(r"\{(" + "|".join(NAMES) + r")\}")


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with its places filled; what is filled in isn't looked at again.

    >>> fill("{problem}? {response} {other}", {"problem": "{gold}", "response": "4"})
    '{gold}? 4 {other}'
    """
    return _PLACES.sub(lambda place: values[place[1]], template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A chat model that gives a score."""

    model: str
    prompt: str
    system: str | None
    regex: Any
    field: str | None
    low: float
    high: float
    thoughts: bool
    options: Mapping[str, Any]
    path: str = "/v1/chat/completions"

    def question(self, sample: Graded) -> Question:
        """The prompt for a sample."""
        values = {
            "problem": problem_of(sample),
            "response": response_of(sample, self.thoughts),
            "gold": sample.gold,
        }
        return clean(fill(self.prompt, values))

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """The request for one question."""
        (asked,) = questions
        messages = [{"role": "user", "content": asked}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return {**self.options, "model": self.model, "messages": messages, "stream": False}

    def scores(self, answer: Any, count: int) -> list[float]:
        """The score in what the judge said, scaled to 0..1."""
        said = answer["choices"][0]["message"]["content"]
        if not isinstance(said, str):
            raise ValueError(f"its message has no text (finish_reason {_ended(answer)})")
        if self.field is None and answer["choices"][0].get("finish_reason") == "length":
            # A score that its reasons name may stand last in what there is; an object is whole or none.
            raise ValueError("its answer was cut (finish_reason 'length'): raise params.max_tokens")
        score = self._in_field(said) if self.field is not None else self._by_pattern(said)
        if not self.low <= score <= self.high:
            raise ValueError(f"the score {score:g} isn't from {self.low:g} to {self.high:g}")
        return [(score - self.low) / (self.high - self.low)]

    def _by_pattern(self, said: str) -> float:
        # The last match: reasons come first, and may name scores too.
        scores = [found.group(1) for found in self.regex.finditer(said)]
        if not scores or scores[-1] is None:
            raise ValueError(f"pattern finds no score in {said[-120:]!r}")
        return _score(scores[-1])

    def _in_field(self, said: str) -> float:
        begin, end = said.find("{"), said.rfind("}")
        try:
            value = json.loads(said[begin : end + 1])[self.field]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise ValueError(
                f"there is no JSON object with {self.field!r} in {said[-120:]!r}"
            ) from None
        return _score(value)


def _ended(answer: Any) -> str:
    return repr(answer["choices"][0].get("finish_reason"))[:40]


def _score(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"the score {value!r:.40} isn't a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"the score {value!r:.40} isn't a number") from None


@register("judge", place="remote")
def judge(
    url: str | None = None,
    model: str | None = None,
    prompt: str = PROMPT,
    system: str | None = None,
    pattern: str | None = None,
    field: str | None = None,
    low: float = 0.0,
    high: float = 10.0,
    thoughts: bool = True,
    max_tokens: int = 1024,
    temperature: float = 0.0,
    options: Mapping[str, Any] | None = None,
    api_key_env: str | None = None,
    seconds: float = 120.0,
    retries: int = 3,
    parallel: int = 16,
    truncated: float | str | None = 0.0,
) -> Asking:
    """A model's score of the response, from 0 to 1.

    Args:
        url: the server's address; ``/v1/chat/completions`` is added.
        model: name of the model there.
        prompt: what is asked, with ``{response}``, and ``{problem}`` and ``{gold}`` if wanted.
        system: a system message before it.
        pattern: RE2's syntax, with one group: the score. The last match counts.
        field: instead, the key of the JSON object that the judge answers with.
        low: the score that is worth 0.
        high: the score that is worth 1; a score outside is a failure.
        thoughts: whether the response is shown with its thoughts.
        max_tokens: of the judge's answer.
        temperature: of the judge.
        options: further keys of the request, as in ``{chat_template_kwargs: {enable_thinking: false}}``.
        api_key_env: environment variable with the key.
        seconds: deadline of one attempt.
        retries: attempts after the first.
        parallel: requests at a time, of each reward pool.
        truncated: value of a response that was cut; null = none, ``ask`` = the judge is asked.
    """
    if pattern is not None and field is not None:
        raise ValueError("give pattern or field, not both")
    template = text("prompt", prompt)
    if "{response}" not in template:
        raise ValueError("prompt has no {response}: the judge wouldn't see what it judges")
    bounds = number("low", low, -1e9, 1e9), number("high", high, -1e9, 1e9)
    if bounds[0] >= bounds[1]:
        raise ValueError(f"low={low} should be less than high={high}")
    sent = {
        "max_tokens": whole("max_tokens", max_tokens, 1, 1_000_000),
        "temperature": number("temperature", temperature, 0.0, 10.0),
        **options_of(options or {}, ("model", "messages", "stream", "n")),
    }
    return asking(
        Judge(
            model=text("model", model),
            prompt=template,
            system=None if system is None else text("system", system),
            regex=None if field is not None else _compiled(pattern or PATTERN),
            field=None if field is None else text("field", field),
            low=bounds[0],
            high=bounds[1],
            thoughts=flag("thoughts", thoughts),
            options=sent,
        ),
        url=url,
        api_key_env=api_key_env,
        seconds=seconds,
        retries=retries,
        parallel=parallel,
        batch=1,
        truncated=truncated,
    )


def _compiled(pattern: object) -> Any:
    """The pattern for RE2, which takes time linear in the text."""
    try:
        import re2
    except ImportError:
        raise ValueError(
            "pattern needs google-re2, which isn't installed: install the extra tandem-rl[reward], "
            "or give field, for a judge that answers in JSON"
        ) from None
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(text("pattern", pattern), options)
    except re2.error as error:
        raise ValueError(f"pattern={pattern!r} isn't RE2's syntax: {error}") from None
    if compiled.groups != 1:
        raise ValueError(
            f"pattern={pattern!r} has {compiled.groups} groups, and one must hold the score: "
            f"write the others as (?:…)"
        )
    return compiled
