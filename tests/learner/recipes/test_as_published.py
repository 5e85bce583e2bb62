"""LUFFY's worked example as its code computes it, metrics among it."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.launch.run.opened.presets import load
from tandem.learner.objectives import make
from tandem.learner.recipes.as_published import (
    MixedLoss,
    bucket_weights,
    mixed_policy_loss,
    supervised_multitask_loss,
)

F64 = torch.float64
A = [-2 / 3, 1 / 3, 1 / 3]
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def computed(hand: ModuleType, advantages: list[float] = A, **options: Any) -> MixedLoss:
    leaf = torch.tensor(hand.P, dtype=F64).log().requires_grad_()
    expert = torch.zeros(3, 4).bool()
    expert[2] = True
    found = mixed_policy_loss(
        leaf,
        torch.tensor(hand.OLD, dtype=F64).log(),
        torch.tensor(advantages, dtype=F64),
        torch.tensor(hand.MASK),
        expert,
        **options,
    )
    found.loss.backward()
    found.loss.leaf = leaf  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("options", "loss", "own", "expert", "weight", "clipped"),
    [
        ({}, 0.002315, 0.087302, -0.200617, 0.601852, 0.0),
        ({"how": "token_mean"}, 0.000926, 0.087302, -0.200617, 0.601852, 0.0),
        (CLIP, 0.049537, 0.114286, -0.200617, 0.601852, 0.2),
        ({"shaping": "none"}, 0.059444, 0.087302, -0.124444, 0.373333, 0.0),
        ({"shaping": "log"}, 0.197271, 0.087302, 0.059324, -0.177971, 0.0),
    ],
)
def test_the_published_cases(
    options: dict[str, Any],
    loss: float,
    own: float,
    expert: float,
    weight: float,
    clipped: float,
    hand: ModuleType,
) -> None:
    found = computed(hand, **options)
    told = (found.loss, found.own_loss, found.expert_loss, found.expert_weight)
    assert [one.item() for one in told] == pytest.approx([loss, own, expert, weight], abs=1e-6)
    assert found.clip_fraction.item() == pytest.approx(clipped)
    assert found.kl.item() == pytest.approx(0.028768, abs=1e-6)


def test_the_published_split_advantages(hand: ModuleType) -> None:
    found = computed(hand, [-0.5, 0.5, 0.5])
    told = (found.loss, found.own_loss, found.expert_loss)
    assert [one.item() for one in told] == pytest.approx(
        [-0.361111, -0.077381, -0.300926], abs=1e-6
    )


def test_the_published_gradient(hand: ModuleType) -> None:
    leaf = computed(hand).loss.leaf  # type: ignore[attr-defined]
    expected = [
        [0.208333, 0.166667, 0.111111, 0],
        [-0.083333, -0.041667, -0.125, -0.083333],
        [-0.011574, -0.015625, -0.008230, 0],
    ]
    torch.testing.assert_close(leaf.grad, torch.tensor(expected, dtype=F64), atol=1e-6, rtol=0)


def test_a_teacher_and_clips_of_its_weight(hand: ModuleType) -> None:
    teacher = torch.full((3, 4), 0.5, dtype=F64).log()
    probs = [p / (0.5 + 1e-6) for p in hand.P[2][:3]]
    found = computed(hand, teacher=teacher)
    assert found.expert_weight.item() == pytest.approx(sum(probs) / 3)
    found = computed(hand, teacher=teacher, expert_clip_high=1.0, expert_clip_low=0.1)
    assert found.expert_weight.item() == pytest.approx((0.1 + probs[1] + 1.0) / 3)
    assert found.at_most.item() == found.at_least.item() == pytest.approx(1 / 3)


def test_likely_tokens_leave_the_loss_and_its_denominator(hand: ModuleType) -> None:
    found = computed(hand, max_probability=0.5, how="token_mean")
    own = 2 / 3 * (1.25 + 1 + 2 / 3) - 1 / 3 * (0.5 + 1)
    expert = -1 / 3 * (0.02 / 0.12 + 0.3 / 0.4)
    assert found.loss.item() == pytest.approx((own + expert) / 7)


@pytest.mark.parametrize(
    ("options", "reshaped"),
    [
        ({"own_shaping": "log"}, lambda p, q: math.log(p / q)),
        (
            {"own_shaping": "plus_log", "own_coefficient": 0.1},
            lambda p, q: p / q + 0.1 * math.log(p / q),
        ),
        ({"own_shaping": "square_root"}, lambda p, q: math.sqrt(p / q)),
        ({"own_shaping": "power", "exponent": 0.3}, lambda p, q: (p / q) ** 0.3),
        ({"own_shaping": "ratio", "own_gamma": 0.5}, lambda p, q: p / (p + 0.5) / (q / (q + 0.5))),
    ],
)
@pytest.mark.parametrize("clip", [{}, CLIP, {"clip_low": 0.2, "clip_high": 0.4}])
def test_own_reshapes_and_their_clips(
    options: dict[str, Any], reshaped: Any, clip: dict[str, float], hand: ModuleType
) -> None:
    total = 0.0
    for row in range(2):
        for p, q, counts in zip(hand.P[row], hand.OLD[row], hand.MASK[row], strict=True):
            ratio = reshaped(p, q)
            near = min(max(ratio, 1 - clip.get("clip_low", 9e9)), 1 + clip.get("clip_high", 9e9))
            total += counts * max(-A[row] * ratio, -A[row] * near)
    expert = -sum(p / (p + 0.1) for p in hand.P[2][:3]) / 3
    found = computed(hand, **options, **clip)
    assert found.loss.item() == pytest.approx((total + expert) / 4)


def test_batches_of_one_kind_and_none_at_all_are_finite(hand: ModuleType) -> None:
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    mask, nothing = torch.ones(2, 3).bool(), torch.zeros(2, 3).bool()
    ones = torch.ones(2)
    for which, expert in ((mask, nothing), (mask, mask), (nothing, nothing)):
        found = mixed_policy_loss(
            logprobs, logprobs.detach(), ones, which, expert, how="token_mean"
        )
        found.loss.backward()
        for name in MixedLoss.__dataclass_fields__:
            assert getattr(found, name).isfinite()
    assert supervised_multitask_loss(logprobs, mask, torch.zeros(2)).item() == 0.0
    assert supervised_multitask_loss(logprobs, mask, torch.tensor([1, 0])).item() == 1.0


RANKS, ROWS, MICRO_BATCHES, WIDTH = 8, 512, 4, 4


class Toy:
    """Eight parameters of which every token's log-prob and entropy are smooth functions."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.features = torch.randn(ROWS, WIDTH, 8, generator=rng, dtype=F64)
        self.advantages = 30 * torch.randn(ROWS, generator=rng, dtype=F64)
        self.old = -2 * torch.rand(ROWS, WIDTH, generator=rng, dtype=F64)
        self.expert = (torch.arange(ROWS) % 8 == 7)[:, None].expand(-1, WIDTH)
        self.parameters = torch.full((8,), 0.1, dtype=F64, requires_grad=True)

    def scored(self) -> tuple[torch.Tensor, torch.Tensor]:
        score = self.features @ self.parameters
        return -torch.nn.functional.softplus(score), torch.sigmoid(score)

    def trained(self, gradient: Any, *, clip: float, eps: float) -> torch.Tensor:
        """The parameters after three steps of AdamW on clipped gradients."""
        optimizer = torch.optim.AdamW([self.parameters], lr=1e-2, betas=(0.9, 0.999), eps=eps)
        for _ in range(3):
            self.parameters.grad = gradient(self)
            norm = torch.nn.utils.clip_grad_norm_([self.parameters], clip)
            assert norm > 1.5 * clip, "or the clip would decide nothing"
            optimizer.step()
        return self.parameters.detach()


def published_gradient(toy: Toy) -> torch.Tensor:
    """Micro-batches' losses and mean entropies are summed up by each rank, gradients averaged."""
    logprobs, entropy = toy.scored()
    mask = torch.ones_like(toy.expert)
    total = logprobs.sum() * 0
    for part in torch.arange(ROWS).chunk(RANKS * MICRO_BATCHES):
        columns = (logprobs, toy.old, toy.advantages, mask, toy.expert)
        loss = mixed_policy_loss(*(column[part] for column in columns)).loss
        total = total + loss - 0.001 * entropy[part].mean()
    return torch.autograd.grad(total / RANKS, toy.parameters)[0]


def test_the_preset_clips_and_steps_as_the_published_code(hand: ModuleType) -> None:
    """Its gradient is rows / ranks = 64 times smaller: so are its clip and Adam's epsilon."""
    found = load("qwen2.5-math-7b-luffy-published").resolve(())
    mini_batch = (
        found.replay.groups_per_step // found.learner.minibatches * found.rollout.group_size
    )
    assert mini_batch == ROWS
    wanted = found.learner.objective
    objective = make(
        "luffy",
        **{key: getattr(wanted, key) for key in ("clip_low", "clip_high", "dual_clip", "gamma")},
        aggregation=wanted.aggregation,
        entropy_over=wanted.entropy_over,
        entropy_coefficient=0.001 * MICRO_BATCHES * RANKS / ROWS,
        expert_negative=True,
    )
    assert wanted.entropy_coefficient == pytest.approx(0.001 * 7 * RANKS / ROWS, rel=0.01)

    def gradient(toy: Toy) -> torch.Tensor:
        logprobs, entropy = toy.scored()
        rows = hand.rows(
            torch.arange(ROWS).repeat_interleave(WIDTH),
            toy.expert.flatten(),
            torch.where(toy.expert, 0.0, toy.old).flatten(),
            toy.advantages,
            logprobs=logprobs.flatten(),
            entropy=entropy.flatten(),
        )
        scalars = hand.scalars_of(objective, rows, constant=float(ROWS * WIDTH))
        return torch.autograd.grad(objective.loss(rows, scalars)[0], toy.parameters)[0]

    optimizer = found.learner.optimizer
    ours = Toy().trained(gradient, clip=optimizer.grad_clip, eps=optimizer.eps)
    theirs = Toy().trained(published_gradient, clip=1.0, eps=1e-8)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    torch.testing.assert_close(
        gradient(Toy()) * 64, published_gradient(Toy()), atol=1e-9, rtol=1e-9
    )


def test_buckets_follow_the_normal_density() -> None:
    found = bucket_weights(8)
    density = [math.exp(-((k - 4) ** 2) / 2) for k in range(1, 8)]
    assert found.tolist() == pytest.approx([d / sum(density) for d in density])
    assert found[3].item() == pytest.approx(0.3991, abs=1e-4)
