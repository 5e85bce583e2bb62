"""A run's own successes come back by what is known of their problems, and never change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tandem.common.errors import StoreError
from tandem.common.records import FinishReason, Group, Source, Verdict
from tandem.learner.recipes.as_published import bucket_weights
from tandem.replay.connection import Store
from tandem.replay.experience import BEGUN, Experience, Known, comes_back, success_of
from tandem.replay.ledger_records import Lease
from tandem.replay.store import RunStore


def group_of(make: Any, problem: str, verdicts: str, **changes: Any) -> Group:
    """A group whose samples are right (r), wrong (w) or without a verdict (-)."""
    kinds = {
        "r": {"verdict": Verdict.CORRECT, "reward": 1.0},
        "w": {"verdict": Verdict.WRONG, "reward": 0.0},
        "-": {"verdict": None, "reward": None},
    }
    samples = tuple(
        make.sample(
            tokens=np.full(6, place, np.int32),
            logprobs=np.full(6, -0.5 - place, np.float32),
            **kinds[kind],
        )
        for place, kind in enumerate(verdicts)
    )
    lease = Lease(group_id="0-0", attempt=1, problem_id=problem, deadline_ms=0)
    return make.graded(lease, **{"samples": samples, **changes})


@pytest.mark.parametrize("of", [2, 7, 8])
def test_a_success_comes_back_by_the_papers_weights(of: int) -> None:
    """Relative to the greatest, which comes back always."""
    weights = bucket_weights(of, mean=of / 2)
    groups = [f"0-{n}" for n in range(4000)]
    for right in range(1, of):
        known = Known(right=right, of=of, trace="a/0#own")
        share = sum(comes_back(known, 3, group) for group in groups) / len(groups)
        chance = float(weights[right - 1] / weights.max())
        assert abs(share - chance) <= 4 * math.sqrt(chance * (1 - chance) / len(groups)) + 1e-9
    assert not any(comes_back(Known(right=of, of=of, trace=""), 3, group) for group in groups)
    drawn = [comes_back(Known(right=1, of=3, trace="x"), seed, "0-0") for seed in range(64)]
    assert {*drawn} == {True}  # one or two of three are equally near the half
    assert not comes_back(Known(right=1, of=1, trace="x"), 3, "0-0")


def test_the_success_is_the_right_sample_of_least_perplexity_that_is_whole(make: Any) -> None:
    group = group_of(make, "a/0", "wrr-")
    right, graded, best = success_of(group)
    assert (right, graded) == (2, 3)
    assert best is group.samples[1]
    own, expert = np.zeros(6, np.uint8), np.full(6, int(Source.EXPERT), np.uint8)
    unknown = np.full(6, np.nan, np.float32)
    for changes in (
        {"finish_reason": FinishReason.LENGTH},
        {"source": expert},
        {"logprobs": unknown},
    ):
        samples = list(group.samples)
        fields = {name: getattr(samples[1], name) for name in samples[1].__struct_fields__}
        samples[1] = type(samples[1])(**{**fields, "source": own, **changes})
        assert success_of(group_of(make, "a/0", "w", samples=tuple(samples)))[2] is samples[2]
    assert success_of(group_of(make, "a/0", "w-"))[2] is None


def test_what_is_learnt_of_problems_and_never_changes(store: Store, make: Any) -> None:
    runs = RunStore(store)
    experience = Experience(runs)
    asked = {f"9-{name}": f"a/{name}" for name in range(4)}

    def step(number: int, *groups: Group, begins_at: float = 0.4) -> dict[str, tuple[str, ...]]:
        for _ in range(2):  # as if it were fetched again after a crash
            experience.learn(number, groups, begins_at)
        return experience.chosen(asked, 7)

    none = dict.fromkeys(asked, ())
    # Below the share of right samples, successes are kept, and none comes back.
    assert step(1, group_of(make, "a/0", "rrww"), group_of(make, "a/1", "wwww")) == none
    first = group_of(make, "a/2", "wwrr")
    begun = step(2, first, group_of(make, "a/3", "rrrr"))
    assert begun == none | {"9-0": ("a/0#own",), "9-2": ("a/2#own",)}
    (trace,) = runs.traces(["a/2#own"])
    kept = first.samples[2]
    assert trace.tokens.tolist() == kept.tokens.tolist()
    assert trace.logprobs is not None
    assert trace.logprobs.tolist() == kept.logprobs.tolist()
    assert (trace.reward, trace.verdict, trace.problem_id) == (1.0, Verdict.CORRECT, "a/2")
    assert store.redis.hget(store.key("trace_rewards"), "a/2#own") == b"1.0"
    # Another success of the problem changes what is known, and not the trace; a failure changes nothing.
    step(3, group_of(make, "a/2", "rwww"), group_of(make, "a/0", "wwww"), begins_at=1.0)
    assert runs.traces(["a/2#own"])[0].tokens.tolist() == kept.tokens.tolist()
    raw = store.redis.hgetall(store.key("experience"))
    assert raw == {
        BEGUN.encode(): b"2",
        b"a/0": b'[2, 4, "a/0#own"]',
        b"a/2": b'[1, 4, "a/2#own"]',
        b"a/3": b'[4, 4, ""]',
    }
    # Once all are right the problem has no success any more, whatever comes later.
    assert step(4, group_of(make, "a/0", "rrrr"), group_of(make, "a/3", "rrww"))["9-0"] == ()
    assert step(5, group_of(make, "a/0", "rrww"))["9-0"] == ()
    assert experience.there(["a/0#own", "a/1#own", "a/2#own"]) == {"a/0#own", "a/2#own"}
    assert experience.chosen({}, 7) == {}


@pytest.mark.parametrize("raw", ["[", "{}", '["1", 2, "x"]', "[1, 2]", "[true, 2, 3]"])
def test_a_damaged_entry_is_told(raw: str, store: Store) -> None:
    store.redis.hset(store.key("experience"), mapping={BEGUN: "1", "a/0": raw})
    with pytest.raises(StoreError, match="what is known of problem 'a/0'"):
        Experience(RunStore(store)).chosen({"0-0": "a/0"}, 7)
