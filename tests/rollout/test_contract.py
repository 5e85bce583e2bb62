"""What all engines share: which requests and weights are refused and why, how a sample is built."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.errors import WeightsError
from tandem.common.records import FinishReason, SamplingParams, Source, Version
from tandem.rollout.contract import Response, Running, enter, finished_group, fitting, refusal
from tandem.rollout.engine import GroupRequest, ParameterSpec, no_tokens
from tandem.rollout.model_facts import ModelFacts

V1, V2 = Version(term=1, step=1), Version(term=1, step=2)
SPECS = (
    ParameterSpec(name="b", shape=(2, 3), dtype="float32"),
    ParameterSpec(name="a", shape=(4,), dtype="bfloat16"),
)
FACTS = ModelFacts(specs=SPECS, parameters=0, vocabulary=32, context=20, end_tokens=frozenset({1}))


def weights(**changed: Any) -> list[tuple[str, Any]]:
    """The parameters of SPECS; None leaves one out."""
    whole = {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(2, 3), **changed}
    return [(name, tensor) for name, tensor in whole.items() if tensor is not None]


def asks(length: int = 5, count: int = 2, **settings: Any) -> GroupRequest:
    settings = {
        "sampling": SamplingParams(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=0),
        **settings,
    }
    prompt = np.arange(3, 3 + length, dtype=np.int32)
    return GroupRequest(group_id="0-0", prompt_tokens=prompt, count=count, seed=0, **settings)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_weights_that_fit_come_in_the_engines_order() -> None:
    assert list(fitting(weights(), SPECS, V1)) == ["b", "a"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"a": None}, r"1 missing \(a\) of its 2"),
        ({"c": torch.zeros(1)}, r"1 unknown \(c\)"),
        ({"a": None, "c": torch.zeros(1)}, r"1 missing \(a\) and 1 unknown \(c\)"),
        (dict.fromkeys("vwxyz", torch.zeros(1)), r"5 unknown \(v, w, x, …\)"),
        ({"b": torch.zeros(3, 2)}, r"b is float32 \(3, 2\), not float32 \(2, 3\)"),
        ({"a": torch.zeros(4)}, r"a is float32 \(4,\), not bfloat16 \(4,\)"),
    ],
)
def test_weights_that_do_not_fit_are_told_apart(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(WeightsError, match=rf"weights 1\.2 don't fit the engine: .*{told}"):
        fitting(weights(**changed), SPECS, V2)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (asks(0), "no tokens"),
        (asks(prefix_tokens=(ids(5),)), "1 prefixes for 2 samples"),
        (
            asks(sampling=SamplingParams(max_new_tokens=0, temperature=1.0, top_p=1.0, top_k=0)),
            "max_new_tokens is under 1",
        ),
        (
            asks(prefix_tokens=ids(5), prefix_logprobs=(None,)),
            "log-probs of 1 prefixes for 2 samples",
        ),
        (
            asks(prefix_tokens=ids(5, 6), prefix_logprobs=(None, np.zeros(1, np.float32))),
            "1 recorded log-probs for a prefix of 2 tokens",
        ),
        (asks(prefix_tokens=ids(32)), "outside the model's 32"),
        (asks(prefix_tokens=(ids(5), ids(-1))), "outside the model's 32"),
        (asks(prefix_tokens=ids(5, 1)), "end token"),
        (asks(15, prefix_tokens=ids(*[5] * 5)), r"15 \+ 5 tokens, and the engine's context has 20"),
    ],
)
def test_a_request_is_refused_with_its_reason(request_: GroupRequest, told: str) -> None:
    found = refusal(request_, FACTS)
    assert re.search(told, found or "")


def test_a_request_that_leaves_room_for_a_token_is_taken() -> None:
    assert refusal(asks(15, prefix_tokens=ids(*[5] * 4)), FACTS) is None


def test_a_sample_is_its_prefix_and_what_was_sampled_after_it(tiny: Any) -> None:
    request = asks(prefix_tokens=(ids(7, 8), no_tokens()))
    response = Response(
        ids(9, 10, 1),
        np.array([-1.0, -2.0, -3.0], dtype=np.float32),
        ((V1, 0, 2), (V1, 2, 2), (V2, 2, 3)),
        FinishReason.STOP,
    )
    group = Running(request, lambda _: None, finished={1: response, 0: response})
    first, second = finished_group(group, tiny.tokenizer()).samples
    assert first.tokens.tolist() == [7, 8, 9, 10, 1]
    assert first.source.tolist() == [Source.EXPERT] * 2 + [Source.OWN] * 3
    np.testing.assert_array_equal(first.logprobs, [np.nan, np.nan, -1.0, -2.0, -3.0])
    # The empty span is no span.
    assert [(s.step, s.start, s.end) for s in first.spans] == [(1, 2, 4), (2, 4, 5)]
    assert [(s.step, s.start, s.end) for s in second.spans] == [(1, 0, 2), (2, 2, 3)]
    assert first.text == tiny.tokenizer().decode([7, 8, 9, 10])


@pytest.mark.parametrize("each", [False, True])
def test_a_prefix_keeps_the_log_probs_that_its_writer_recorded(tiny: Any, each: bool) -> None:
    recorded = np.array([-0.25, -1.5], dtype=np.float32)
    request = asks(
        prefix_tokens=(ids(7, 8), ids(9)) if each else ids(7, 8),
        prefix_logprobs=(recorded, None) if each else recorded,
    )
    response = Response(
        ids(10), np.array([-3.0], dtype=np.float32), ((V1, 0, 1),), FinishReason.STOP
    )
    group = Running(request, lambda _: None, finished={0: response, 1: response})
    first, second = finished_group(group, tiny.tokenizer()).samples
    np.testing.assert_array_equal(first.logprobs, [-0.25, -1.5, -3.0])
    lacking = [np.nan, -3.0] if each else [-0.25, -1.5, -3.0]
    np.testing.assert_array_equal(second.logprobs, lacking)


def test_groups_enter_together_or_not_at_all() -> None:
    running: dict[str, Running] = {}
    enter([Running(asks(), lambda _: None)], running)
    other = GroupRequest(
        group_id="0-1",
        prompt_tokens=ids(3),
        count=1,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        seed=0,
    )
    with pytest.raises(ValueError, match="0-0"):
        enter([Running(other, lambda _: None), Running(asks(), lambda _: None)], running)
    assert list(running) == ["0-0"]
