"""From groups and traces to rows, and from rows to tensors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.errors import DataError
from tandem.common.records import (
    ExpertTrace,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Verdict,
    VersionSpan,
)
from tandem.learner.objectives import make
from tandem.learner.rows.groups import MixedGroup, rows_of
from tandem.learner.rows.microbatch import micro_batch
from tandem.learner.rows.rows import Rows


def sample(tokens: list[int], **changes: Any) -> Sample:
    length = len(tokens)
    values: dict[str, Any] = {
        "tokens": np.array(tokens, np.int32),
        "source": np.zeros(length, np.uint8),
        "logprobs": np.full(length, -0.5, np.float32),
        "spans": (VersionSpan(term=1, step=3, start=0, end=length),),
        "finish_reason": FinishReason.STOP,
        "sampling": SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        "text": "",
        "reward": 0.0,
        "verdict": Verdict.WRONG,
        "components": {},
        "extracted": None,
        "grader": None,
    }
    return Sample(**(values | changes))


def trace(
    tokens: list[int], logprobs: list[float] | None = None, source: list[int] | None = None
) -> ExpertTrace:
    return ExpertTrace(
        trace_id="t",
        problem_id="a/0",
        tokens=np.array(tokens, np.int32),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        text="",
        tokenizer_digest="",
        reward=1.0,
        verdict=Verdict.CORRECT,
        components={},
        grader=None,
        source=None if source is None else np.array(source, np.uint8),
    )


def group(
    *samples: Sample, prompt: tuple[int, ...] = (7, 8), traces: tuple[ExpertTrace, ...] = ()
) -> MixedGroup:
    made = Group(
        group_id="0-0",
        attempt=1,
        worker="rollout-0",
        problem_id="a/0",
        prompt_tokens=np.array(prompt, np.int32),
        prompt_text="",
        gold="",
        data_source="",
        samples=samples,
        trace_ids=(),
        extra={},
    )
    return MixedGroup(group=made, traces=traces)


def rows(*groups: MixedGroup, **changes: Any) -> Rows:
    values: dict[str, Any] = {"step": 5, "temperature": 1.0, "baseline": "group_mean"}
    return rows_of(groups, **(values | changes))


def test_an_expert_prefix_with_an_own_continuation_is_one_row() -> None:
    mixed = sample(
        [11, 12, 13, 41, 2],
        source=np.array([1, 1, 1, 0, 0], np.uint8),
        logprobs=np.array([np.nan, np.nan, np.nan, -0.3, -0.1], np.float32),
        spans=(VersionSpan(term=1, step=3, start=3, end=5),),
    )
    found = rows(group(mixed))
    assert found.count == 1
    assert found.expert.tolist() == [True, True, True, False, False]
    assert found.known.tolist() == [False, False, False, True, True]
    torch.testing.assert_close(found.behaviour, torch.tensor([0, 0, 0, -0.3, -0.1]))
    # The learner's weights at step 5 are of step 4.
    assert found.lag.tolist() == [-1, -1, -1, 1, 1]
    assert found.expert_row.tolist() == [True]


def test_a_trace_fills_the_group_up_with_its_known_log_probs() -> None:
    experts = (trace([9, 9, 2], [-1, -2, -3]),)
    found = rows(group(sample([3, 4]), sample([5]), traces=experts), temperature=0.7)
    assert found.rewards.tolist() == [0.0, 0.0, 1.0]
    assert found.behaviour.tolist() == [-0.5, -0.5, -0.5, -1.0, -2.0, -3.0]
    torch.testing.assert_close(found.temperature[-3:], torch.full((3,), 0.7))
    torch.testing.assert_close(found.advantages, torch.tensor([-1, -1, 2]).double() / 3)


def test_what_others_wrote_in_a_trace_is_context_alone() -> None:
    masked = trace([9, 4, 4, 9, 2], [-1, -2, -3, -4, -5], source=[1, 2, 2, 1, 1])
    found = rows(group(sample([3, 4]), traces=(masked,)))
    assert found.ids.tolist() == [7, 8, 3, 4, 7, 8, 9, 4, 4, 9, 2]
    assert found.row.tolist() == [0, 0, 1, 1, 1]
    assert found.position.tolist() == [0, 1, 0, 3, 4]
    assert found.expert.tolist() == [False, False, True, True, True]
    assert found.behaviour.tolist()[2:] == [-1, -4, -5]
    assert found.lengths.tolist() == [2, 3]
    assert found.response_lengths.tolist() == [2, 5]


def test_sft_scores_at_temperature_1_and_rl_at_the_samples() -> None:
    hot = sample(
        [3, 4], sampling=SamplingParams(temperature=0.5, top_p=1.0, top_k=0, max_new_tokens=1024)
    )
    mixed = group(hot, traces=(trace([9]),))
    for name, expected in (
        ("luffy", [0.5, 0.5, 0.5]),
        ("rl_sft_loss", [0.5, 0.5, 1]),
        ("sft", [1, 1, 1]),
    ):
        plain = make(name).plain_temperature
        found = rows(mixed, temperature=0.5, plain_temperature=plain)
        assert found.temperature.tolist() == expected


@pytest.mark.parametrize(
    "bad",
    [
        {"verdict": None, "reward": None},
        {"verdict": Verdict.CRASHED, "reward": 0.0},
        {"verdict": Verdict.GOLD_UNPARSABLE, "reward": None},
        {"logprobs": np.array([-0.5, np.nan], np.float32)},
    ],
    ids=["ungraded", "crashed", "gold unparsable", "without behaviour log-probs"],
)
def test_a_row_that_says_nothing_leaves_baseline_and_loss(bad: dict[str, Any]) -> None:
    right = sample([3, 4], reward=1.0, verdict=Verdict.CORRECT)
    found = rows(group(right, sample([3]), sample([5, 6], **bad)))
    assert found.count == 2
    assert found.advantages.tolist() == [0.5, -0.5]
    assert len(found.row) == 3


@pytest.mark.parametrize(
    ("how", "row_advantages", "masked"),
    [
        ("wrong", [0.5, -0.5], [False, False]),
        ("mask", [0.5, -0.5], [False, True]),
        ("zero_advantage", [0.5, 0.0], [False, False]),
    ],
)
def test_what_becomes_of_a_row_cut_by_length(
    how: str, row_advantages: list[float], masked: list[bool]
) -> None:
    cut = sample([3], finish_reason=FinishReason.LENGTH)
    right = sample([3, 4], reward=1.0, verdict=Verdict.CORRECT)
    for of_the_others in ("wrong", "mask", "zero_advantage"):
        found = rows(group(right, cut), truncation=how, stragglers=of_the_others)
        assert found.advantages.tolist() == row_advantages
        assert found.masked.tolist() == masked


@pytest.mark.parametrize(
    ("how", "row_advantages", "masked"),
    [
        ("wrong", [0.5, -0.5], [False, False]),
        ("mask", [0.5, -0.5], [False, True]),
        ("zero_advantage", [0.5, 0.0], [False, False]),
    ],
)
def test_what_becomes_of_a_row_cut_at_its_groups_deadline(
    how: str, row_advantages: list[float], masked: list[bool]
) -> None:
    late = sample([3], finish_reason=FinishReason.DEADLINE)
    right = sample([3, 4], reward=1.0, verdict=Verdict.CORRECT)
    for of_the_others in ("wrong", "mask", "zero_advantage"):
        found = rows(group(right, late), truncation=of_the_others, stragglers=how)
        assert found.advantages.tolist() == row_advantages
        assert found.masked.tolist() == masked
        # Its tokens count in the denominators whatever becomes of it.
        assert found.lengths.tolist() == [2, 1]


def test_stragglers_that_are_left_out_leave_the_baseline_too() -> None:
    late = sample([3], finish_reason=FinishReason.DEADLINE)
    right = sample([3, 4], reward=1.0, verdict=Verdict.CORRECT)
    found = rows(group(right, sample([5]), late), stragglers="leave_out")
    assert found.advantages.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_prefixs_tokens_are_weighed_against_the_log_probs_that_were_recorded(
    recorded: bool,
) -> None:
    """LUFFY's weight of an expert token, f(w) = w / (w + γ) with w = π_θ / π_φ."""
    phi = np.array([-0.7, -1.9], np.float32)
    begun = sample(
        [3, 4, 5],
        source=np.array([1, 1, 0], np.uint8),
        logprobs=np.array([*(phi if recorded else [np.nan] * 2), -0.5], np.float32),
        spans=(VersionSpan(term=1, step=4, start=2, end=3),),
        reward=1.0,
        verdict=Verdict.CORRECT,
    )
    found = rows(group(sample([3, 4]), begun))
    now = torch.tensor([-0.5, -0.5, -0.4, -1.2, -0.5], dtype=torch.float64)
    objective = make("luffy", gamma=0.1, aggregation="constant")
    loss, _ = objective.loss(found.with_columns(logprobs=now), {"constant": 1.0})
    behind = phi.astype(np.float64) if recorded else np.zeros(2)
    weight = np.exp(np.array([-0.4, -1.2]) - behind)
    shaped = weight / (weight + 0.1)
    # Own tokens have a ratio of 1; advantages are −0.5 and 0.5.
    assert float(loss) == pytest.approx(2 * 0.5 - 0.5 - 0.5 * shaped.sum(), abs=1e-6)


def test_environment_text_is_context_and_no_target() -> None:
    tool = sample([3, 4, 5, 6], source=np.array([0, 2, 2, 0], np.uint8))
    found = rows(group(tool))
    micro = micro_batch(found)
    assert micro.input_ids.tolist() == [[7, 8, 3, 4, 5]]
    assert micro.targets.tolist() == [3, 6]
    assert micro.index.tolist() == [1, 4]
    assert found.position.tolist() == [0, 3]
    assert found.lengths.tolist() == [2]


def test_what_environment_text_has_earned_goes_to_the_token_before_it() -> None:
    def earning(source: list[int], rewards: list[float] | None) -> Sample:
        count = len(source)
        logprobs = np.where(np.array(source) == 0, -1.0, np.nan)
        return sample(
            list(range(count)),
            source=np.array(source, np.uint8),
            logprobs=logprobs.astype(np.float32),
            token_rewards=None if rewards is None else np.array(rewards, np.float32),
        )

    found = rows(
        group(earning([0, 0, 2, 2, 0], [1, 2, 3, 4, 5]), earning([0, 0], None)),
        group(earning([2, 0, 2, 0], [7, 1, 1, 1]), earning([2, 2], [1, 1])),
    )
    assert found.token_rewards is not None
    assert found.token_rewards.tolist() == [1, 9, 5, 0, 0, 9, 1]
    none = rows(group(earning([0], None), earning([0], None)))
    assert none.token_rewards is not None
    assert none.token_rewards.tolist() == [0, 0]


def test_every_target_is_predicted_at_the_token_before_it(made_up: ModuleType) -> None:
    found = made_up.random_rows(1)
    micro = micro_batch(found.select(torch.tensor([5, 0, 9])))
    flat = micro.input_ids.reshape(-1)
    width = micro.input_ids.shape[1]
    at = 0
    for place, row in enumerate((5, 0, 9)):
        whole = found.select(torch.tensor([row])).ids
        for number in range(int(micro.rows.lengths[place])):
            target = int(micro.targets[at])
            column = int(micro.index[at]) - place * width
            assert whole[column + 1] == target
            assert flat[int(micro.index[at])] == whole[column]
            assert int(micro.rows.position[at]) >= number
            at += 1
    assert at == len(micro.targets)


def test_chosen_rows_take_all_that_is_theirs_along(made_up: ModuleType) -> None:
    """Each column of a row by itself is its part of the whole."""
    found = made_up.random_rows(1)
    apart = [found.select(torch.tensor([row])) for row in range(found.count)]
    assert [one.count for one in apart] == [1] * found.count
    for name, column in found.tensors():
        parts = [
            one.row + number if name == "row" else getattr(one, name)
            for number, one in enumerate(apart)
        ]
        assert torch.equal(torch.cat(parts), column), name
    backwards = found.select(torch.arange(found.count).flip(0))
    assert torch.equal(backwards.ids, torch.cat([one.ids for one in reversed(apart)]))
    assert backwards.select(torch.arange(found.count).flip(0)).row.tolist() == found.row.tolist()


def test_a_step_of_no_groups_has_no_rows() -> None:
    found = rows()
    assert (found.count, found.groups, len(found.ids), len(found.row)) == (0, 0, 0, 0)
    assert micro_batch(found).dummy


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="problem a/0 has an empty prompt"):
        rows(group(sample([3]), prompt=()))


def paired(found: Rows) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each row."""
    parts = []
    sizes = zip(found.prompt_lengths.tolist(), found.response_lengths.tolist(), strict=True)
    for start, (prompt, response) in zip(found.starts.tolist(), sizes, strict=True):
        ids = found.ids[start : start + prompt + response].tolist()
        parts.append((ids[:prompt], ids[prompt:]))
    return parts


def test_a_prompt_never_has_a_response_of_its_own_group() -> None:
    """Two responses to one question, and one to another."""
    found = rows(
        group(traces=(trace([11, 2]), trace([12, 12, 2])), prompt=(7, 8)),
        group(traces=(trace([21, 2]),), prompt=(9,)),
    ).mismatched()
    assert found is not None
    assert paired(found) == [([7, 8], [21, 2]), ([7, 8], [21, 2]), ([9], [11, 2])]
    assert found.group.tolist() == [0, 0, 1]


def test_a_prompt_never_has_a_response_of_its_own_in_another_group() -> None:
    """Three pairs, of which two are of the same question."""
    found = rows(
        group(traces=(trace([11]), trace([12])), prompt=(7, 8)),
        group(traces=(trace([13]), trace([14])), prompt=(7, 8)),
        group(traces=(trace([21]), trace([22])), prompt=(7,)),
    ).mismatched()
    assert found is not None
    assert paired(found) == [
        *(([7, 8], [22]), ([7, 8], [21])),
        *(([7, 8], [22]), ([7, 8], [21])),
        *(([7], [13]), ([7], [14])),
    ]


def test_one_question_in_several_groups_has_nothing_to_be_mismatched_with() -> None:
    assert rows(group(traces=(trace([11]),)), group(traces=(trace([12]),))).mismatched() is None
