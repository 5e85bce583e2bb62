"""Scores of graded samples, as pure functions of them.

M problems, n samples of each, c of them right. Nothing here draws from a global generator, and nothing depends
on the order of the samples beyond their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.records import FinishReason
from ...replay.evaluating.evaluated import EvaluatedSample

RESAMPLES = 2000
"""Resamples of a bootstrap."""
CONFIDENCE = 0.95
"""Share of the resamples that an interval holds."""
_CHUNK = 1 << 22
"""Indices that are drawn at a time."""

Floats = NDArray[np.float64]
Group = list[EvaluatedSample]
"""The samples of one problem, by number."""


# --- of numbers ------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k of one problem (Chen et al., arXiv 2107.03374): 1 − C(n−c, k) / C(n, k).

    This is the chance that at least one of k of the n samples, drawn without replacement, is right.
    NaN for n < k, where nothing unbiased can be said.

    >>> pass_at_k(8, 1, 4), pass_at_k(4, 0, 4), pass_at_k(2, 2, 4)
    (0.5, 0.0, nan)
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass@{k} of {c} right samples among {n} can't be")
    if n < k:
        return math.nan
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(classes: Sequence[int | None]) -> int | None:
    """The class that most samples are of.

    Ties: the class whose first sample comes first. Samples without an answer (None) are no class: they
    can't win, and only where there is no answer at all is there no majority (None).

    >>> majority([None, None, 2, 1, 1, 2]), majority([None])
    (2, None)
    """
    votes: dict[int, int] = {}
    for one in classes:
        if one is not None:
            votes[one] = votes.get(one, 0) + 1
    # Dictionaries keep the order of first appearance, and max takes the first of equals.
    return max(votes, key=lambda one: votes[one], default=None)


def bootstrap(
    values: Sequence[float] | Floats,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """Percentile interval of the mean of ``[M]`` values, by resampling them; NaN without values.

    With one value for each problem (the share of its samples that are right) the samples of a problem stay
    together, so that the interval is as wide as the problems differ. The draws are those of an own Philox
    generator with this seed.
    """
    array = np.asarray(values, np.float64)
    if not array.size:
        return math.nan, math.nan
    rng = np.random.Generator(np.random.Philox(seed))
    means = np.empty(resamples)
    step = max(1, _CHUNK // array.size)
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        drawn = rng.integers(0, array.size, (count, array.size))
        means[start : start + count] = array[drawn].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.percentile(means, [100 * tail, 100 * (1.0 - tail)])
    return float(low), float(high)


def mcnemar(first_only: int, second_only: int) -> float:
    """Exact two-sided p-value of McNemar's test: whether two shares of right answers to the same problems differ.

    Args:
        first_only: problems that only the first has right.
        second_only: problems that only the second has right.
    """
    pairs, fewer = first_only + second_only, min(first_only, second_only)
    tail = sum(math.comb(pairs, i) for i in range(fewer + 1))
    # The quotient of whole numbers, which may themselves be beyond a float.
    return min(1.0, 2 * tail / 2**pairs)


# --- of samples ------------------------------------------------------------------------------


def by_problem(samples: Iterable[EvaluatedSample]) -> list[Group]:
    """The samples of each problem by number, the problems in their order."""
    found: dict[int, Group] = {}
    for sample in samples:
        found.setdefault(sample.place, []).append(sample)
    return [sorted(found[place], key=lambda one: one.sample) for place in sorted(found)]


def shares(groups: Sequence[Group]) -> Floats:
    """``[M]`` share of each problem's samples that are right; its mean is avg@n."""
    return np.array([sum(s.correct for s in group) / len(group) for group in groups], np.float64)


def pass_of(groups: Sequence[Group], k: int) -> float:
    """Mean pass@k over problems; NaN if one has fewer than k samples."""
    each = [pass_at_k(len(group), sum(s.correct for s in group), k) for group in groups]
    return float(np.mean(each)) if each else math.nan


def majority_right(group: Group) -> bool:
    """Whether the majority's answer is right (maj@n, n = the number of samples)."""
    won = majority([sample.answer_class for sample in group])
    return any(s.correct for s in group if won is not None and s.answer_class == won)


def ks(groups: Sequence[Group]) -> list[int]:
    """The k of pass@k that all problems have enough samples for: powers of two, and the number of samples.

    Empty if there is only one sample.
    """
    least = min((len(group) for group in groups), default=0)
    return sorted({2**i for i in range(1, 32) if 2**i <= least} | {least}) if least > 1 else []


def figures(groups: Sequence[Group], *, seed: int = 0) -> dict[str, Any]:
    """Figures of some problems' samples, as plain data; None for what isn't known.

    ``accuracy`` counts an ungraded sample as not right (the lower bound), and ``accuracy_at_most`` as right.
    ``interval`` is that of the accuracy over problems, ``pass@k`` and ``maj@n`` are there with more than one
    sample, and ``classes`` are the shares of samples by form, then answer (``10``: formed, not right).
    """
    flat = [sample for group in groups for sample in group]
    if not flat:
        return {"problems": 0, "samples": 0}
    each = shares(groups)
    at_most = [sum(s.correct or s.ungraded for s in group) / len(group) for group in groups]
    low, high = bootstrap(each, seed=seed)
    counts = sorted({len(group) for group in groups})
    lengths = np.array([s.tokens for s in flat])
    rewards = [s.reward for s in flat if s.reward is not None]
    logprobs = [s.logprob for s in flat if s.logprob is not None]
    found: dict[str, Any] = {
        "problems": len(groups),
        "samples": len(flat),
        "per_problem": counts[0] if len(counts) == 1 else counts,
        "accuracy": float(each.mean()),
        "interval": [low, high],
        "accuracy_at_most": float(np.mean(at_most)),
        "ungraded": sum(s.ungraded for s in flat),
        **{f"pass@{k}": pass_of(groups, k) for k in ks(groups)},
    }
    if counts[-1] > 1:
        name = f"maj@{counts[0]}" if len(counts) == 1 else "maj"
        found[name] = float(np.mean([majority_right(group) for group in groups]))
    found |= {
        **_forms(flat),
        "reward": float(np.mean(rewards)) if rewards else None,
        "length": float(lengths.mean()),
        "length_percentiles": {
            f"p{p}": int(np.percentile(lengths, p, method="higher")) for p in (50, 90, 100)
        },
        "truncated": float(np.mean([s.finish_reason is FinishReason.LENGTH for s in flat])),
        "unanswered": float(np.mean([s.extracted is None for s in flat])),
        "logprob": float(np.mean(logprobs)) if logprobs else None,
    }
    if any(s.second is not None for s in flat):
        found["second"] = _second(flat)
    return found


def _forms(flat: Group) -> dict[str, Any]:
    formed = [s.formed for s in flat]
    if all(one is None for one in formed):
        return {"format": None, "classes": {}}
    pairs = [f"{int(bool(form))}{int(s.correct)}" for form, s in zip(formed, flat, strict=True)]
    values = [value for s in flat if (value := s.components.get("format")) is not None]
    return {
        "format": float(np.mean(values)),
        "classes": {name: pairs.count(name) / len(flat) for name in ("11", "10", "01", "00")},
    }


def _second(flat: Group) -> dict[str, Any]:
    """How a second grader's labels stand beside the first's."""
    labelled = [s for s in flat if s.second is not None]
    pairs = [(s.correct, s.second == "correct") for s in labelled]
    return {
        "accuracy": float(np.mean([second for _, second in pairs])),
        "agree": float(np.mean([first == second for first, second in pairs])),
        "only_first": sum(first and not second for first, second in pairs),
        "only_second": sum(second and not first for first, second in pairs),
    }


def summary(samples: Iterable[EvaluatedSample], *, seed: int = 0) -> dict[str, Any]:
    """All figures of a cell: of all its problems, and by source, subject and level where there are several.

    ``accuracy_of_sources`` is the mean of the sources' accuracies, which weighs a small source as much as a
    large one.
    """
    groups = by_problem(samples)
    found = figures(groups, seed=seed)
    for name in ("source", "subject", "level"):
        parts = split(groups, name)
        if name != "source" and not parts:
            continue
        found[f"by_{name}"] = {
            key: figures(part, seed=seed) for key, part in sorted(parts.items(), key=_natural)
        }
    accuracies = [part["accuracy"] for part in found.get("by_source", {}).values()]
    if len(accuracies) > 1:
        found["accuracy_of_sources"] = float(np.mean(accuracies))
    return found


def _natural(item: tuple[str, Any]) -> tuple[Any, ...]:
    """Level 10 after level 9."""
    digits = "".join(c for c in item[0] if c.isdecimal())
    return (int(digits) if digits else -1, item[0])


def split(groups: Sequence[Group], name: str) -> dict[str, list[Group]]:
    """The problems by ``source``, ``subject`` or ``level``; those that have none are left out."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        key = getattr(group[0], name)
        if key is not None:
            found.setdefault(str(key), []).append(group)
    return found


def answer_classes(
    groups: Sequence[Sequence[tuple[str | None, bool]]],
    same: Callable[[Sequence[tuple[str, str]]], Sequence[bool]],
) -> list[list[int | None]]:
    """Which samples of each problem have the same answer: for each the number of the first that has it.

    All right answers are one class, and no wrong one is in it, as the gold answer says. Wrong answers are
    compared with the first of each class, by the grader and not by their text.

    Args:
        groups: for each problem its samples' answers, and whether each is right.
        same: whether the first of each pair of answers is right by the second.
    """
    found: list[list[int | None]] = [[None] * len(group) for group in groups]
    waiting: list[dict[str, list[int]]] = []
    for group, classes in zip(groups, found, strict=True):
        texts: dict[str, list[int]] = {}
        first_right: int | None = None
        for number, (answer, right) in enumerate(group):
            if right:
                first_right = number if first_right is None else first_right
                classes[number] = first_right
            elif answer is not None and answer.strip():
                texts.setdefault(answer, []).append(number)
        waiting.append(texts)
    # Round by round, the first answer of each problem that has no class yet begins one.
    while any(waiting):
        pairs: list[tuple[str, str]] = []
        places: list[tuple[int, int]] = []
        for index, texts in enumerate(waiting):
            if not texts:
                continue
            first, numbers = next(iter(texts.items()))
            del texts[first]
            for number in numbers:
                found[index][number] = numbers[0]
            pairs += [(text, first) for text in texts]
            places += [(index, numbers[0])] * len(texts)
        for (text, _), (index, begun), equal in zip(pairs, places, same(pairs), strict=True):
            if equal:
                for number in waiting[index].pop(text):
                    found[index][number] = begun
    return found


def compare(first: Sequence[Group], second: Sequence[Group], *, seed: int = 0) -> dict[str, Any]:
    """The difference of two accuracies on the same problems, second minus first, paired by problem.

    The interval is a bootstrap of the problems' differences; with one sample each, McNemar's test is beside
    it. The groups must be of the same problems in the same order.
    """
    before, after = shares(first), shares(second)
    low, high = bootstrap(after - before, seed=seed)
    found: dict[str, Any] = {
        "problems": len(before),
        "first": float(before.mean()),
        "second": float(after.mean()),
        "difference": float((after - before).mean()),
        "interval": [low, high],
        "better": int((after > before).sum()),
        "worse": int((after < before).sum()),
    }
    if all(len(group) == 1 for group in (*first, *second)):
        found["mcnemar_p"] = mcnemar(found["worse"], found["better"])
    return found
