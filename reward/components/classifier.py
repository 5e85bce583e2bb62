"""The classifier: a reward model behind an HTTP server, which scores responses in batches.

==============  ==========================================  ==========================================
``api``         request                                     answer
==============  ==========================================  ==========================================
``classify``    vLLM: ``POST /classify`` with ``input``     ``data[i].probs``, in the order of
                (texts) or ``messages``                     ``index``
``pooling``     vLLM: ``POST /pooling`` with ``input``      ``data[i].data``: numbers of a response
                or ``messages``
``tei``         text-embeddings-inference: ``POST           for each text a list of
                /predict`` with ``inputs``                  ``{label, score}``
==============  ==========================================  ==========================================

vLLM serves one conversation per request and applies the reward model's own chat template; a text is sent
as it is.
"""

from __future__ import annotations

import math
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
)
from .judge import fill
from .registry import Graded, register

PATHS = {"classify": "/classify", "pooling": "/pooling", "tei": "/predict"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """A model that gives numbers."""

    api: str
    path: str
    model: str | None
    template: str | None
    label: int | str | None
    scale: tuple[float, float] | None
    thoughts: bool
    options: Mapping[str, Any]

    def question(self, sample: Graded) -> Question:
        """A text, or a conversation that ends with the response."""
        response = clean(response_of(sample, self.thoughts))
        if self.template is None:
            prompt = [
                {"role": message["role"], "content": clean(message["content"])}
                for message in sample.messages
            ]
            return [*prompt, {"role": "assistant", "content": response}]
        values = {"problem": problem_of(sample), "response": response, "gold": sample.gold}
        return clean(fill(self.template, values))

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """The request for these questions."""
        body = dict(self.options)
        if self.model is not None:
            body["model"] = self.model
        if self.api == "tei":
            body["inputs"] = [[question] for question in questions]
        elif self.template is None:
            (body["messages"],) = questions
        else:
            body["input"] = list(questions)
        return body

    def scores(self, answer: Any, count: int) -> list[float]:
        """A number for each question, scaled if the config says so."""
        if self.api == "tei":
            found = [self._of_labels(labels) for labels in answer]
        else:
            data = sorted(answer["data"], key=lambda one: int(one["index"]))
            if [int(one["index"]) for one in data] != list(range(count)):
                raise ValueError(f"it should have the indices 0 to {count - 1}")
            key = "probs" if self.api == "classify" else "data"
            found = [self._of_numbers(one[key]) for one in data]
        return [self._scaled(score) for score in found]

    def _of_numbers(self, numbers: Any) -> float:
        while isinstance(numbers, list) and len(numbers) == 1 and isinstance(numbers[0], list):
            numbers = numbers[0]
        if not isinstance(numbers, list) or not all(type(one) in (int, float) for one in numbers):
            raise ValueError("a response's scores aren't a list of numbers")
        if self.label is None and len(numbers) != 1:
            raise ValueError(f"it has {len(numbers)} scores for a response: choose one with label")
        place = self.label if isinstance(self.label, int) else 0
        if place >= len(numbers):
            raise ValueError(f"it has {len(numbers)} scores for a response, and label={place}")
        return float(numbers[place])

    def _of_labels(self, labels: Any) -> float:
        scores = {one["label"]: one["score"] for one in labels}
        if not all(type(score) in (int, float) for score in scores.values()):
            raise ValueError("a response's scores aren't numbers")
        if self.label is None and len(scores) == 1:
            return float(*scores.values())
        name = f"LABEL_{self.label}" if isinstance(self.label, int) else self.label
        if name not in scores:
            known = ", ".join(map(str, scores))[:80]
            raise ValueError(f"it has the labels {known}: choose one with label")
        return float(scores[name])

    def _scaled(self, score: float) -> float:
        if not math.isfinite(score):
            raise ValueError(f"the score {score} isn't finite")
        if self.scale is None:
            return score
        low, high = self.scale
        return min(1.0, max(0.0, (score - low) / (high - low)))


@register("classifier", place="remote")
def classifier(
    url: str | None = None,
    api: str = "classify",
    model: str | None = None,
    template: str | None = None,
    label: int | str | None = None,
    low: float | None = None,
    high: float | None = None,
    thoughts: bool = True,
    options: Mapping[str, Any] | None = None,
    api_key_env: str | None = None,
    seconds: float = 60.0,
    retries: int = 3,
    parallel: int = 8,
    batch: int = 32,
    truncated: float | str | None = 0.0,
) -> Asking:
    """The score that a reward model gives the response.

    Args:
        url: the server's address, without the path.
        api: ``classify``, ``pooling`` or ``tei``.
        model: name of the model there; vLLM takes its only model if it is left out.
        template: text with ``{problem}``, ``{response}`` and ``{gold}``; null = vLLM gets the
            conversation, and applies the model's chat template.
        label: which of several scores counts: a place, or (``tei``) a label.
        low: the score that is worth 0; with ``high``, scores are scaled to 0..1 and cut there.
        high: the score that is worth 1.
        thoughts: whether the response is sent with its thoughts.
        options: further keys of the request, as in ``{use_activation: false}``.
        api_key_env: environment variable with the key.
        seconds: deadline of one attempt.
        retries: attempts after the first.
        parallel: requests at a time, of each reward pool.
        batch: most texts of one request; a conversation is sent alone.
        truncated: value of a response that was cut; null = none, ``ask`` = the model is asked.
    """
    if api not in PATHS:
        raise ValueError(f"api={api!r} isn't one of {', '.join(PATHS)}")
    if template is None and api == "tei":
        raise ValueError(
            "api=tei takes texts: give a template, as in {problem}\\n{response}, in the form of the "
            "reward model's training"
        )
    if template is not None and "{response}" not in text("template", template):
        raise ValueError("template has no {response}: the model wouldn't see what it scores")
    if (low is None) != (high is None):
        raise ValueError("give low and high, or neither")
    scale = None
    if low is not None:
        scale = number("low", low, -1e9, 1e9), number("high", high, -1e9, 1e9)
        if scale[0] >= scale[1]:
            raise ValueError(f"low={low} should be less than high={high}")
    by_place = isinstance(label, int) and not isinstance(label, bool) and label >= 0
    if label is not None and not by_place and not (isinstance(label, str) and api == "tei"):
        raise ValueError(f"label={label!r} should be a place from 0, or with api=tei a label")
    return asking(
        Classifier(
            api=api,
            path=PATHS[api],
            model=None if model is None else text("model", model),
            template=template,
            label=label,
            scale=scale,
            thoughts=flag("thoughts", thoughts),
            options=options_of(options or {}, ("model", "input", "inputs", "messages")),
        ),
        url=url,
        api_key_env=api_key_env,
        seconds=seconds,
        retries=retries,
        parallel=parallel,
        batch=1 if template is None else batch,
        truncated=truncated,
    )
