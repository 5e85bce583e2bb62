"""Scores: each figure against a count by hand or by brute force."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from tandem.common.config import RewardConfig
from tandem.common.records import FinishReason, Verdict
from tandem.replay.evaluating.evaluated import EvaluatedSample
from tandem.reward.grading import Grader
from tandem.rollout.evaluate import scores


def sample(place: int, number: int, right: bool = False, **given: Any) -> EvaluatedSample:
    verdict = Verdict.CORRECT if right else Verdict.WRONG
    fields: dict[str, Any] = {
        "problem_id": f"set/{place}",
        "place": place,
        "sample": number,
        "source": "a",
        "prompt": "",
        "response": "",
        "gold": "7",
        "finish_reason": FinishReason.STOP,
        "verdict": verdict,
        "answer": verdict,
        "components": {"format": 1.0},
        "reward": float(right),
        "grader": "boxed@5",
        "tokens": 10,
        "logprob": -1.0,
        "extracted": "7" if right else "8",
        "answer_class": number,
    }
    return EvaluatedSample(**{**fields, **given})


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (7, 7)])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample(n: int, c: int) -> None:
    right = [i < c for i in range(n)]
    for k in range(1, n + 1):
        subsets = [any(chosen) for chosen in combinations(right, k)]
        assert scores.pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))
    assert math.isnan(scores.pass_at_k(n, c, n + 1))


def test_pass_at_k_is_refused_for_counts_that_cannot_be() -> None:
    for n, c, k in ((2, 3, 1), (2, -1, 1), (2, 1, 0)):
        with pytest.raises(ValueError, match="can't be"):
            scores.pass_at_k(n, c, k)


def percentile(ordered: list[float], share: float) -> float:
    """The value at a share of the way through, linear between two."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def resampled(values: list[float], seed: int, resamples: int) -> list[float]:
    """The percentile bootstrap's interval, one resample after the other."""
    rng = np.random.Generator(np.random.Philox(seed))
    means = []
    for _ in range(resamples):
        drawn = [values[i] for i in rng.integers(0, len(values), len(values))]
        means.append(math.fsum(drawn) / len(drawn))
    means.sort()
    return [percentile(means, 0.025), percentile(means, 0.975)]


def at_least_as_rare(count: int, trials: int) -> float:
    """The two-sided exact test of a fair coin: the chance of all counts that are no likelier than this one."""
    ways = [math.comb(trials, i) for i in range(trials + 1)]
    return float(Fraction(sum(w for w in ways if w <= ways[count]), 2**trials))


def test_the_interval_is_that_of_a_percentile_bootstrap() -> None:
    values = np.random.Generator(np.random.Philox(5)).integers(0, 9, 60) / 8
    ours = scores.bootstrap(values, seed=3, resamples=1500)
    assert ours == pytest.approx(resampled(values.tolist(), 3, 1500), abs=1e-12)
    assert ours != scores.bootstrap(values, seed=4, resamples=1500)


def test_many_resamples_come_to_the_interval_of_all_that_there_are() -> None:
    values = [0.0, 0.1, 0.3, 0.7, 1.0, 0.55]
    means = sorted(math.fsum(drawn) / 6 for drawn in product(values, repeat=6))
    expected = [percentile(means, 0.025), percentile(means, 0.975)]
    assert scores.bootstrap(values, resamples=200_000) == pytest.approx(expected, abs=0.01)


def test_drawing_in_pieces_changes_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(37) / 36
    whole = scores.bootstrap(values, seed=1, resamples=500)
    monkeypatch.setattr(scores, "_CHUNK", 101)
    assert scores.bootstrap(values, seed=1, resamples=500) == whole


def test_the_interval_draws_problems_and_no_samples() -> None:
    # Each problem is always or never solved: 4 samples of each say no more than one.
    groups = [[sample(p, n, right=p % 2 == 0) for n in range(4)] for p in range(20)]
    alone = [group[:1] for group in groups]
    assert scores.figures(groups)["interval"] == scores.figures(alone)["interval"]


def test_mcnemar_is_the_exact_test_of_a_fair_coin() -> None:
    for first, second in ((0, 0), (3, 9), (9, 3), (5, 5), (40, 71), (900, 1000)):
        expected = at_least_as_rare(first, first + second)
        assert scores.mcnemar(first, second) == pytest.approx(expected, rel=1e-9)
    # 3 or fewer of 12, or 9 or more: 2 * (1 + 12 + 66 + 220) of 4,096.
    assert scores.mcnemar(3, 9) == 598 / 4096


def test_a_comparison_is_paired_by_problem() -> None:
    rng = np.random.Generator(np.random.Philox(0))
    rights = rng.random((2, 50)) < [[0.4], [0.6]]
    first, second = ([[sample(p, 0, bool(r))] for p, r in enumerate(row)] for row in rights)
    found = scores.compare(first, second, seed=9)
    difference = rights[1].astype(float) - rights[0]
    assert found["difference"] == pytest.approx(difference.mean())
    assert found["interval"] == pytest.approx(
        resampled(difference.tolist(), 9, scores.RESAMPLES), abs=1e-12
    )
    only_first, only_second = int((difference < 0).sum()), int((difference > 0).sum())
    assert (found["worse"], found["better"]) == (only_first, only_second)
    assert found["mcnemar_p"] == pytest.approx(
        at_least_as_rare(only_first, only_first + only_second)
    )
    several = [[*group, sample(p, 1)] for p, group in enumerate(first)]
    assert "mcnemar_p" not in scores.compare(several, several)


def test_a_tie_goes_to_the_class_that_came_first_and_no_answer_never_wins() -> None:
    assert scores.majority([3, 1, 1, 3]) == 3
    assert scores.majority([None, None, None, 4]) == 4
    assert scores.majority([None]) is None
    assert scores.majority_right([sample(0, 0, answer_class=None, extracted=None)]) is False


def test_figures_by_hand() -> None:
    length, crashed = FinishReason.LENGTH, Verdict.CRASHED
    groups = [
        [sample(0, 0, True, answer_class=0), sample(0, 1, True, answer_class=0), sample(0, 2)],
        [sample(1, 0, True), sample(1, 1, answer_class=1), sample(1, 2, answer_class=1)],
        [
            sample(2, 0, finish_reason=length, tokens=40, components={"format": 0.0}),
            sample(2, 1, verdict=crashed, answer=crashed, reward=None),
            sample(2, 2, answer_class=None, extracted=None),
        ],
    ]
    found = scores.figures(groups)
    assert (found["problems"], found["samples"], found["per_problem"]) == (3, 9, 3)
    assert found["accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 3)
    assert found["accuracy_at_most"] == pytest.approx((2 / 3 + 1 / 3 + 1 / 3) / 3)
    assert found["ungraded"] == 1
    assert found["pass@2"] == pytest.approx((1 + 2 / 3) / 3)
    assert found["pass@3"] == pytest.approx(2 / 3)
    assert found["maj@3"] == pytest.approx(1 / 3)
    assert found["classes"] == pytest.approx({"11": 3 / 9, "10": 5 / 9, "01": 0, "00": 1 / 9})
    assert found["length"] == pytest.approx(120 / 9)
    assert found["truncated"] == pytest.approx(1 / 9)
    assert found["unanswered"] == pytest.approx(1 / 9)
    assert found["reward"] == pytest.approx(3 / 8)


@pytest.mark.parametrize("failure", ["judge_failed", "timeout", "memory", "crashed"])
def test_a_component_that_fails_leaves_the_answer_as_it_was_graded(failure: str) -> None:
    answers = Verdict.CORRECT, Verdict.WRONG, Verdict.CRASHED
    failed = {"verdict": Verdict(failure), "reward": None}
    groups = [[sample(p, 0, answer=one, **failed)] for p, one in enumerate(answers)]
    found = scores.figures(groups)
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert found["accuracy_at_most"] == pytest.approx(2 / 3)
    assert found["ungraded"] == 1


def test_problems_with_more_samples_weigh_no_more() -> None:
    # As in a file that repeats the rows of its small sets.
    often = [[sample(p, n, p == 0, source="aime") for n in range(8)] for p in range(2)]
    once = [[sample(p, 0, True, source="math")] for p in range(2, 8)]
    found = scores.summary([s for group in (*often, *once) for s in group])
    assert found["accuracy"] == pytest.approx(7 / 8)
    assert found["accuracy_of_sources"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["by_source"]["aime"]["pass@8"] == pytest.approx(0.5)
    assert "pass@8" not in found
    assert found["per_problem"] == [1, 8]


def test_subjects_and_levels_have_their_own_figures_in_natural_order() -> None:
    levels = ["Level 10", "Level 9", None]
    flat = [sample(p, 0, p == 1, subject="algebra", level=one) for p, one in enumerate(levels)]
    found = scores.summary(flat)
    assert list(found["by_level"]) == ["Level 9", "Level 10"]
    assert found["by_level"]["Level 9"]["accuracy"] == 1.0
    assert found["by_subject"]["algebra"]["problems"] == 3


def test_a_level_with_a_raised_digit_is_a_level_like_others() -> None:
    flat = [sample(p, 0, level=one) for p, one in enumerate(["x² 10", "x² 9"])]
    assert list(scores.summary(flat)["by_level"]) == ["x² 9", "x² 10"]


def test_a_second_graders_labels_stand_beside_the_first() -> None:
    right, wrong = Verdict.CORRECT, Verdict.WRONG
    groups = [[sample(0, 0, True, second=right)], [sample(1, 0, True, second=wrong)]]
    assert scores.figures(groups)["second"] == {
        "accuracy": 0.5,
        "agree": 0.5,
        "only_first": 1,
        "only_second": 0,
    }


def test_wrong_answers_are_one_class_if_the_grader_says_so() -> None:
    answers: list[tuple[str | None, bool]] = [
        ("0.5", False),
        (None, False),
        ("7", True),
        ("\\frac{1}{2}", False),
        ("7.0", True),
        ("8", False),
        ("0.5", False),
    ]
    with Grader(RewardConfig()) as grader:
        found = scores.answer_classes([answers, [("3", False)]], grader.same_answers)
    assert found == [[0, None, 2, 0, 2, 5, 0], [0]]
