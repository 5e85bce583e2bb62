"""The figures of an evaluation of one set, from its samples alone: what a run records, and what `tandem evaluate` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...common.errors import DataError
from ...replay.evaluating.evaluated import EvaluatedSample
from ...replay.evaluating.evaluations import four_classes
from . import scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of evaluating a set of problems."""

    problems: int
    """Number of problems."""
    samples: int
    """Responses per problem (k of avg@k), of those whose rows aren't repeated."""
    accuracy: float
    """avg@k: mean over problems of the share of their responses that are correct."""
    pass_rate: float
    """Share of problems with at least one correct response: pass@k where each has k."""
    format_share: float
    """Share of responses in the right form; NaN if the reward has no component for it."""
    right_and_formed: float | None
    """Share of responses that are correct and in the right form; None if the form isn't known."""
    classes: dict[str, float]
    """Shares by form, then answer: ``11``, ``10``, ``01``, ``00``; empty if the form isn't known."""
    reward: float
    """Mean composed reward of the responses that have one; NaN if none has."""
    mean_length: float
    """Mean tokens per response, end token included."""
    cut_share: float
    """Share of responses that were cut by the length limit."""
    ungraded: int
    """Responses whose grading failed by no fault of theirs; they count as not correct."""
    by_source: dict[str, float]
    """Accuracy by data source."""
    pass_by_source: dict[str, float]
    """``pass_rate`` by data source."""
    problems_by_source: dict[str, int]
    """Number of problems by data source."""
    step: int | None
    """Step of the oldest weights that sampled; None if the engine has no version."""
    version: str
    """Versions of the weights that sampled, ``term.step``, oldest first; empty if there are none."""
    seconds: float
    """Wall time in seconds, grading included."""
    tokens: int
    """Number of sampled tokens."""
    figures: dict[str, float]
    """Further figures by name: ``pass@k`` for powers of two, ``maj@k``, ``truncated``, ``ungraded``, the bounds
    ``accuracy_low`` and ``accuracy_high`` of the 95% interval, and by source as ``source/NAME/pass@k``."""

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data; NaN becomes None."""
        plain = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in plain.items()}


def summarise(samples: Sequence[EvaluatedSample], *, seconds: float) -> Evaluation:
    """The figures of a set's samples.

    Args:
        samples: all of them, with the classes of their answers.
        seconds: wall time of the whole evaluation.

    Raises:
        DataError: there are none.
    """
    if not samples:
        raise DataError("an evaluation needs at least one problem, and the set is empty")
    groups = scores.by_problem(samples)
    by_source = scores.split(groups, "source")
    found = scores.figures(groups)
    forms = [one.formed for one in samples]
    formed = np.array([bool(form) for form in forms])
    correct = np.array([one.correct for one in samples])
    is_known = any(form is not None for form in forms)
    both = float(np.mean(formed & correct)) if is_known else None
    accuracy = found["accuracy"]
    versions = sorted({version for one in samples for version in one.versions})
    return Evaluation(
        problems=len(groups),
        samples=min(map(len, groups)),
        accuracy=accuracy,
        pass_rate=_any_right(groups),
        format_share=found["format"] if is_known else float("nan"),
        right_and_formed=both,
        classes=four_classes(accuracy, float(np.mean(formed)) if is_known else float("nan"), both),
        reward=found["reward"] if found["reward"] is not None else float("nan"),
        mean_length=found["length"],
        cut_share=found["truncated"],
        ungraded=found["ungraded"],
        by_source={s: float(scores.shares(part).mean()) for s, part in sorted(by_source.items())},
        pass_by_source={s: _any_right(part) for s, part in sorted(by_source.items())},
        problems_by_source={s: len(part) for s, part in sorted(by_source.items())},
        step=min((version.step for version in versions), default=None),
        version=" ".join(f"{version.term}.{version.step}" for version in versions),
        seconds=seconds,
        tokens=sum(one.tokens for one in samples),
        figures=_flat(found, by_source),
    )


def _any_right(groups: Sequence[scores.Group]) -> float:
    return float(np.mean([any(one.correct for one in group) for group in groups]))


def _flat(
    found: Mapping[str, Any], by_source: Mapping[str, Sequence[scores.Group]]
) -> dict[str, float]:
    """Figures that a run records beside its own."""

    def several(figures: Mapping[str, Any]) -> dict[str, float]:
        return {k: v for k, v in figures.items() if k.startswith(("pass@", "maj"))}

    low, high = found["interval"]
    flat = {
        "accuracy_low": low,
        "accuracy_high": high,
        "truncated": found["truncated"],
        "ungraded": float(found["ungraded"]),
        **several(found),
    }
    for source, groups in by_source.items():
        flat |= {f"source/{source}/{k}": v for k, v in several(scores.figures(groups)).items()}
    return flat
