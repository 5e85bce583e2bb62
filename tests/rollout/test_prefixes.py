"""How the samples of a group begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tandem.common.config import Config, build
from tandem.common.records import ExpertTrace, Verdict
from tandem.rollout.prefixes import prefixes


def config_of(limit: int = 100, **expert: Any) -> Config:
    return build(
        {
            "run": {"steps": 100, "seed": 3},
            "data": {"train": [{"path": "unused.parquet", "name": "a"}]},
            "rollout": {"group_size": 5, "max_new_tokens": limit},
            "expert": {"per_group": 2, **expert},
        }
    )


def trace(length: int, logprobs: np.ndarray | None = None) -> ExpertTrace:
    return ExpertTrace(
        trace_id="a/0#0",
        problem_id="a/0",
        tokens=np.arange(length, dtype=np.int32),
        logprobs=logprobs,
        text="",
        tokenizer_digest="",
        reward=1.0,
        verdict=Verdict.CORRECT,
        components={},
        grader=None,
    )


def lengths(config: Config, *traces: ExpertTrace, group: str = "0-0", step: int = 0) -> list[int]:
    return [len(one) for one in prefixes(config, group, step, traces).tokens]


def test_the_last_samples_begin_with_the_traces() -> None:
    config = config_of(prefix="fixed", prefix_low=0.2, prefix_high=0.6)
    assert lengths(config, trace(10), trace(20)) == [0, 0, 0, 2, 12]
    *_, last = prefixes(config, "0-0", 0, [trace(10)]).tokens
    assert last.tolist() == [0, 1, 2, 3, 4, 5]


def test_recorded_log_probs_are_cut_with_their_tokens() -> None:
    config = config_of(prefix="fixed", prefix_low=0.2, prefix_high=0.6)
    recorded = -np.arange(20, dtype=np.float32)
    found = prefixes(config, "0-0", 0, [trace(10), trace(20, recorded)])
    assert found.logprobs[:4] == (None, None, None, None)
    assert found.logprobs[4] is not None
    assert found.logprobs[4].tolist() == [-float(n) for n in range(12)]


@pytest.mark.parametrize(("limit", "longest"), [(100, 9), (8, 7)])
def test_a_token_is_left_to_the_policy(limit: int, longest: int) -> None:
    config = config_of(limit, prefix="fixed", prefix_high=1.0)
    assert lengths(config, trace(10)) == [0, 0, 0, 0, longest]
    assert lengths(config, trace(1)) == [0, 0, 0, 0, 0]


def test_what_is_drawn_is_keyed_by_the_group() -> None:
    config = config_of(prefix="random", prefix_high=1.0)
    found = [lengths(config, trace(90), trace(90), group=f"0-{n}") for n in range(20)]
    assert found == [lengths(config, trace(90), trace(90), group=f"0-{n}") for n in range(20)]
    assert len({tuple(one) for one in found}) == 20


@pytest.mark.parametrize(("steps", "at_50"), [(None, 45), (200, 67)])
def test_a_schedule_runs_over_its_steps_or_the_runs(steps: int | None, at_50: int) -> None:
    config = config_of(prefix="linear", prefix_high=0.9, prefix_steps=steps)
    assert lengths(config, trace(100), step=0)[-1] == 90
    assert lengths(config, trace(100), step=50)[-1] == at_50
    assert lengths(config, trace(100), step=200)[-1] == 0
