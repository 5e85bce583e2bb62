"""Episodes as rows: the turns of tokens, what a malformed call leaves out, and credit by turns and by a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem.common.objectives.keys import Baseline
from tandem.common.records import (
    Episode,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Turn,
    Verdict,
    VersionSpan,
)
from tandem.learner.objectives import make
from tandem.learner.rows.groups import MixedGroup, rows_of
from tandem.learner.rows.rows import Rows

SCALARS = {
    "own_tokens": 8.0,
    "expert_tokens": 0.0,
    "sequences": 2.0,
    "constant": 16.0,
    "width": 8.0,
    "step": 1.0,
}


def episode(first: float, second: float, *, malformed: bool = False, **changes: Any) -> Sample:
    """Two turns of two tokens each, which earned this, with two tokens of the environment between them."""
    values: dict[str, Any] = {
        "tokens": np.array([3, 4, 9, 9, 5, 6], np.int32),
        "source": np.array([0, 0, 2, 2, 0, 0], np.uint8),
        "logprobs": np.array([-0.5, -0.5, np.nan, np.nan, -0.5, -0.5], np.float32),
        "spans": (
            VersionSpan(term=1, step=0, start=0, end=2),
            VersionSpan(term=1, step=0, start=4, end=6),
        ),
        "finish_reason": FinishReason.STOP,
        "sampling": SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8),
        "text": "",
        "reward": first + second,
        "verdict": Verdict.CORRECT,
        "components": {},
        "extracted": None,
        "grader": None,
        "token_rewards": np.array([0, first, 0, 0, 0, second], np.float32),
        "episode": Episode(
            environment="sums",
            reward=first + second,
            failure=None,
            detail="",
            turns=(
                Turn(start=0, end=2, reward=first, malformed=malformed),
                Turn(start=4, end=6, reward=second, malformed=False),
            ),
            metrics={},
        ),
    }
    return Sample(**(values | changes))


def group_of(samples: Sequence[Sample], name: str = "0-0") -> MixedGroup:
    made = Group(
        group_id=name,
        attempt=1,
        worker="rollout-0",
        problem_id="a/0",
        prompt_tokens=np.array([7], np.int32),
        prompt_text="",
        gold="",
        data_source="",
        samples=tuple(samples),
        trace_ids=(),
        extra={},
    )
    return MixedGroup(group=made)


def rows(*samples: Sample, **changes: Any) -> Rows:
    return rows_of_groups([group_of(samples)], **changes)


def rows_of_groups(groups: Sequence[MixedGroup], **changes: Any) -> Rows:
    settings: dict[str, Any] = {"step": 1, "temperature": 1.0, "baseline": "group_mean"}
    return rows_of(groups, **(settings | changes))


def dead(sample: Sample, verdict: Verdict, *, has_tokens: bool) -> Sample:
    """The same episode, killed: before it asked the model, or after it had sampled."""
    assert sample.episode is not None
    killed = replace(sample.episode, reward=None, failure=verdict, detail="killed")
    if has_tokens:
        return replace(sample, reward=None, verdict=verdict, token_rewards=None, episode=killed)
    nothing = np.zeros(0, np.int32)
    return replace(
        sample,
        tokens=nothing,
        source=nothing.astype(np.uint8),
        spans=(),
        logprobs=nothing.astype(np.float32),
        token_rewards=None,
        reward=None,
        verdict=verdict,
        episode=replace(killed, turns=()),
    )


def gradient(these: Rows, name: str, **settings: Any) -> torch.Tensor:
    """``[N]`` of an objective's loss, with respect to the tokens' log-probs."""
    leaf = torch.full((len(these.row),), -0.5, dtype=torch.float64, requires_grad=True)
    columns = {"logprobs": leaf, "proximal": leaf.detach(), "entropy": torch.ones(len(leaf))}
    loss, _ = make(name, **settings).loss(these.with_columns(**columns), SCALARS)
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def test_every_token_knows_its_turn_whatever_text_is_between() -> None:
    short = episode(0, 1, episode=None, token_rewards=None)
    found = rows(episode(1, 0), short)
    assert found.turn.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert not found.muted.any()


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "gspo_token", "cispo", "tis", "decoupled_ppo", "reinforce"]
)
def test_a_turn_with_a_malformed_call_stays_out_of_the_loss_and_in_the_denominators(
    name: str,
) -> None:
    group = episode(1, 0, malformed=True), episode(0, 0)
    with_it, without = rows(*group), rows(*group, mask_malformed=True)
    assert without.muted.tolist() == [True, True, *[False] * 6]
    assert without.lengths.tolist() == with_it.lengths.tolist() == [4, 4]
    assert torch.equal(without.advantages, with_it.advantages)
    before, after = gradient(with_it, name), gradient(without, name)
    assert (before != 0).all()
    assert after[:2].tolist() == [0.0, 0.0]
    # Since the denominators count it still, the other turns weigh what they did.
    torch.testing.assert_close(after[2:], before[2:])


def test_turns_have_the_advantages_of_what_comes_from_them_on() -> None:
    """The returns with γ = 0.5 are (0.5, 1) and (1, 0)."""
    found = rows(episode(0, 1), episode(1, 0))
    assert found.advantages.tolist() == [0.0, 0.0]
    found = found.with_advantages(found.rewards, "group_mean", 0.5)
    expected = torch.tensor([-0.25, -0.25, 0.5, 0.5, 0.25, 0.25, -0.5, -0.5]).double()
    assert found.token_advantages is not None
    torch.testing.assert_close(found.token_advantages, expected)
    # Rows of equal rewards would need no forward pass; these do.
    objective = make("grpo", turn_discount=0.5)
    assert objective.active(found).tolist() == [True, True]
    torch.testing.assert_close(gradient(found, "grpo", turn_discount=0.5), -expected / 16)


def test_what_an_episode_is_paid_beyond_its_turns_belongs_to_the_last_one() -> None:
    paid = episode(1, 0, reward=3.0)
    found = rows(paid, episode(0, 0)).with_advantages(
        torch.tensor([3.0, 0.0]).double(), "none", 1.0
    )
    assert found.token_advantages is not None
    assert found.token_advantages.tolist() == [3, 3, 2, 2, 0, 0, 0, 0]


def test_an_episode_that_was_cut_may_have_no_advantage_at_any_turn() -> None:
    cut = episode(1, 1, finish_reason=FinishReason.LENGTH)
    found = rows(cut, episode(0, 0), truncation="zero_advantage")
    found = found.with_advantages(found.rewards, "group_mean", 1.0)
    assert found.token_advantages is not None
    assert found.token_advantages.tolist() == [0, 0, 0, 0, -1, -1, -0.5, -0.5]


def test_a_critics_credit_goes_from_a_turn_to_the_one_before_across_the_environments_text() -> None:
    """γ = 1, λ = 0.5: δ = (0.1, 0.6, 0.1, 0.6), and A_t = δ_t + λ A_{t+1}."""
    objective = make("ppo", whiten=False, gae_lambda=0.5)
    values = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0, 0.0, 0.0, 0.0]).double()
    filled, _ = objective.estimated(rows(episode(0.5, 1), episode(0, 0)), values)
    assert filled.token_advantages is not None
    expected = [0.1 + 0.5 * 0.8, 0.6 + 0.5 * 0.4, 0.1 + 0.5 * 0.6, 0.6]
    torch.testing.assert_close(
        filled.token_advantages[:4], torch.tensor(expected).double(), atol=1e-6, rtol=0
    )


def test_a_turn_that_is_out_of_the_loss_is_not_among_what_advantages_are_whitened_over() -> None:
    group = episode(0.5, 1, malformed=True), episode(0, 0.25)
    these = rows(*group, mask_malformed=True)
    values = torch.tensor([9.0, 9.0, 0.3, 0.4, 0.1, 0.2, 0.0, 0.3]).double()
    filled, figures = make("ppo").estimated(these, values)
    assert filled.token_advantages is not None
    among = filled.token_advantages[~these.muted]
    assert len(among) == 6
    assert float(among.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(among.var()) == pytest.approx(1.0, abs=1e-6)
    assert figures["value_mean"] == pytest.approx(float(values[2:].mean()))


@pytest.mark.parametrize("discount", [None, 0.9])
@pytest.mark.parametrize("baseline", sorted(get_args(Baseline)))
def test_killed_episodes_change_no_others_advantages(
    baseline: Baseline, discount: float | None
) -> None:
    """15% of them in 40 groups of eight, before and after they have sampled."""
    drawn = np.random.default_rng(3)
    whole, without = [], []
    killed = 0
    for number in range(40):
        group = [episode(*drawn.integers(0, 3, 2).astype(float)) for _ in range(8)]
        hit = drawn.random(8) < 0.15
        killed += int(hit.sum())
        verdicts = [
            (Verdict.ENV_FAILED, Verdict.ENV_TIMEOUT, Verdict.ENV_RESET)[n]
            for n in drawn.integers(0, 3, 8)
        ]
        whole.append(
            group_of(
                [
                    dead(one, verdict, has_tokens=bool(drawn.random() < 0.5)) if gone else one
                    for one, gone, verdict in zip(group, hit, verdicts, strict=True)
                ],
                f"0-{number}",
            )
        )
        alive = [one for one, gone in zip(group, hit, strict=True) if not gone]
        without.append(group_of(alive, f"0-{number}"))
    assert killed > 30
    found, expected = (
        made.with_advantages(made.rewards, baseline, discount)
        for made in (rows_of_groups(one, baseline=baseline) for one in (whole, without))
    )
    assert len(found.rewards) == 320 - killed
    assert torch.equal(found.advantages, expected.advantages)
    assert (found.advantages != 0).any()
    if discount is not None:
        assert found.token_advantages is not None
        assert expected.token_advantages is not None
        assert torch.equal(found.token_advantages, expected.token_advantages)
