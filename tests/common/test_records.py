"""Records: what they refuse, and what they derive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tandem.common.plain import Record
from tandem.common.records import (
    Episode,
    ExpertTrace,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Turn,
    Verdict,
    Version,
    VersionSpan,
)


def sample(*spans: tuple[int, int, int], length: int = 4, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32),
        "source": np.zeros(length, np.uint8),
        "logprobs": np.zeros(length, np.float32),
        "spans": tuple(VersionSpan(term=1, step=s, start=a, end=b) for s, a, b in spans),
        "finish_reason": FinishReason.STOP,
        "sampling": SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        "text": "",
        "reward": None,
        "verdict": None,
        "components": {},
        "extracted": None,
        "grader": None,
    }
    return Sample(**{**values, **changes})


def group(*samples: Sample, **changes: Any) -> Group:
    values: dict[str, Any] = {
        "group_id": "0-0",
        "attempt": 1,
        "worker": "w",
        "problem_id": "a/0",
        "prompt_tokens": np.arange(2, dtype=np.int32),
        "prompt_text": "p",
        "gold": "1",
        "data_source": "d",
        "samples": samples,
        "trace_ids": (),
        "extra": {},
    }
    return Group(**{**values, **changes})


def test_versions_compare_by_term_then_step():
    assert Version(term=2, step=0) > Version(term=1, step=99)
    assert Version(term=2, step=1) > Version(term=2, step=0)
    assert str(Version(term=2, step=7)) == "2.7"


def test_the_oldest_step_is_that_of_the_oldest_span_with_tokens():
    assert sample((5, 0, 2), (6, 2, 4)).oldest_step == 5
    assert sample((3, 0, 0), (6, 0, 4)).oldest_step == 6


def test_a_sample_without_own_tokens_has_no_oldest_step():
    assert sample().oldest_step is None


def test_a_group_is_as_old_as_its_oldest_sample():
    assert group(sample((5, 0, 4)), sample(), sample((4, 0, 4))).oldest_step == 4
    assert group(sample()).oldest_step is None


@pytest.mark.parametrize("field", ["source", "logprobs"])
def test_arrays_of_different_lengths_are_refused(field: str):
    with pytest.raises(ValueError, match="differ in length"):
        sample(**{field: np.zeros(3, np.uint8)})


def test_failures_that_are_not_the_texts_own_leave_the_baseline():
    leaving = {verdict for verdict in Verdict if verdict.leaves_baseline}
    assert leaving == {
        *(Verdict.CRASHED, Verdict.GOLD_UNPARSABLE, Verdict.JUDGE_FAILED),
        *(Verdict.ENV_FAILED, Verdict.ENV_TIMEOUT, Verdict.ENV_RESET),
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_of_episodes_and_turns_are_finite(value: float):
    with pytest.raises(ValueError, match="finite"):
        Turn(start=0, end=1, reward=value, malformed=False)
    with pytest.raises(ValueError, match="finite"):
        episode(reward=value)


def test_an_episode_fails_in_its_own_ways_and_has_its_turns_within_the_sample():
    with pytest.raises(ValueError, match="isn't a way for an episode to fail"):
        episode(failure=Verdict.WRONG)
    with pytest.raises(ValueError, match="a turn to its token 9"):
        sample(
            length=2, episode=episode(turns=(Turn(start=0, end=9, reward=None, malformed=False),))
        )


def episode(**changes: Any) -> Episode:
    given = {"environment": "e", "reward": 1.0, "failure": None, "detail": "", "turns": ()}
    return Episode(**{**given, "metrics": {}, **changes})


@pytest.mark.parametrize(
    "tokens", [np.array([1.5, 2.0]), np.array([True, False]), np.array([2**40])]
)
def test_token_ids_that_no_int32_can_hold_are_refused(tokens: Any):
    with pytest.raises(ValueError, match=r"^Group\.prompt_tokens holds .* values that int32"):
        group(prompt_tokens=tokens)


def test_a_two_dimensional_array_is_refused():
    with pytest.raises(ValueError, match=r"^Group\.prompt_tokens should be one-dimensional"):
        group(prompt_tokens=np.zeros((2, 2), np.int32))


def test_a_sample_has_a_reward_for_each_token_or_for_none():
    assert sample(length=2, token_rewards=[0, 1]).token_rewards.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="a sample of 2 tokens has rewards of 3 tokens"):
        sample(length=2, token_rewards=[0, 1, 2])


def test_other_widths_become_the_declared_ones_where_nothing_is_lost():
    found = sample(tokens=np.arange(8)[::2], logprobs=[0, -1, -2, -3])
    assert (found.tokens.dtype, found.tokens.tolist()) == (np.int32, [0, 2, 4, 6])
    assert (found.logprobs.dtype, found.logprobs.tolist()) == (np.float32, [0.0, -1.0, -2.0, -3.0])


def trace(**changes: Any) -> ExpertTrace:
    values: dict[str, Any] = {
        "trace_id": "a/0#0",
        "problem_id": "a/0",
        "tokens": np.arange(3, dtype=np.int32),
        "logprobs": None,
        "text": "",
        "tokenizer_digest": "",
        "reward": 1.0,
        "verdict": Verdict.CORRECT,
        "components": {},
        "grader": None,
    }
    return ExpertTrace(**{**values, **changes})


def test_every_token_of_a_trace_is_the_experts_or_the_environments():
    assert trace(source=[1, 2, 1]).source.dtype == np.uint8
    with pytest.raises(ValueError, match="differ in length: tokens 3, source 2"):
        trace(source=[1, 2])
    with pytest.raises(ValueError, match=r"tokens of sources \[0, 1\]: they may be 1 \(expert\)"):
        trace(source=[1, 0, 1])


LATER = {Sample: {"token_rewards", "episode"}, ExpertTrace: {"source"}}
"""Fields that came later."""
KINDS = [kind for kind in Record.__subclasses__() if kind.__module__ == Sample.__module__]


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_every_record_is_frozen_keyword_only_and_whole(cls: type[Record]):
    config = cls.__struct_config__
    assert config.frozen
    assert config.forbid_unknown_fields
    assert not cls.__match_args__  # what could be given by place
    # A field that came later has a default, which isn't written: what older releases stored stays as it was.
    later = {field.name for field in structs.fields(cls) if not field.required}
    assert later == LATER.get(cls, set())
    assert config.omit_defaults == bool(later)
