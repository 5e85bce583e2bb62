"""The losses on padded tensors: by hand, and against the trainer's objectives on flat tokens."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tandem.learner.objectives import make
from tandem.learner.recipes.padded import (
    aggregate_padded,
    group_advantages,
    grpo_micro_batch,
    grpo_step,
    policy_gradient_losses,
    rollout_rewards,
    sft_micro_batch,
)

F64 = torch.float64
NOW = torch.tensor([[0.5, 0.4, 0.3], [0.6, 0.1, 0.9]], dtype=F64).log()
OLD = torch.tensor([[0.4, 0.4, 0.5], [0.6, 0.2, 0.6]], dtype=F64).log()
MASK = torch.tensor([[True, True, False], [True, True, True]])
A = torch.tensor([1.0, -2.0], dtype=F64)


def test_rewards_come_with_the_means_of_their_parts() -> None:
    def reward(text: str, gold: str) -> dict[str, float]:
        right = float(text == gold)
        return {"reward": right, "format": 0.5}

    rewards, means = rollout_rewards(reward, ["4", "5"], ["4", "4"])
    assert rewards.tolist() == [1.0, 0.0]
    assert means == {"mean_reward": 0.5, "mean_format": 0.5}


@pytest.mark.parametrize(
    ("baseline", "normalizer", "expected"),
    [
        ("mean", "none", [0.5, -0.5, 1.0, -1.0]),
        ("mean", "std", [0.7071, -0.7071, 0.7071, -0.7071]),
        ("mean", "mean", [1.0, -1.0, 1.0, -1.0]),
        ("none", "none", [1.0, 0.0, 2.0, 0.0]),
        ("none", "mean", [2.0, 0.0, 2.0, 0.0]),
    ],
)
def test_advantages_of_groups(baseline: str, normalizer: str, expected: list[float]) -> None:
    found = group_advantages(
        torch.tensor([1.0, 0.0, 2.0, 0.0]), 2, baseline=baseline, normalizer=normalizer  # type: ignore[arg-type]
    )  # fmt: skip
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        ("none", [0.693147, 0.916291], [-1.021651, -4.605170, -0.210721]),
        ("noclip", [-1.25, -1.0], [2.0, 1.0, 3.0]),
        ("grpo", [-1.2, -1.0], [2.0, 1.6, 3.0]),
        # Geometric means: √1.25 = 1.118, (1 · ½ · 1.5)^⅓ = 0.9086.
        ("gspo", [-1.118034, -1.118034], [1.817121, 1.817121, 1.817121]),
        ("cispo", [0.831777, 0.916291], [-1.021651, -2.302585, -0.252866]),
    ],
)
def test_each_method_by_hand(method: str, first: list[float], second: list[float]) -> None:
    found, _ = policy_gradient_losses(A, NOW, method, old_logprobs=OLD, clip=0.2, mask=MASK)  # type: ignore[arg-type]
    expected = torch.tensor([*first, *second], dtype=F64)
    torch.testing.assert_close(found[MASK], expected, atol=1e-6, rtol=0)


def test_what_a_method_needs_is_asked_for() -> None:
    for method in ("noclip", "grpo", "gspo", "cispo"):
        with pytest.raises(ValueError, match="needs old_logprobs"):
            policy_gradient_losses(A, NOW, method)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs clip"):
        policy_gradient_losses(A, NOW, "grpo", old_logprobs=OLD)
    with pytest.raises(ValueError, match="mask of the responses"):
        policy_gradient_losses(A, NOW, "gspo", old_logprobs=OLD, clip=0.2)
    with pytest.raises(ValueError, match="constant to divide by"):
        aggregate_padded(NOW, MASK, "constant")


@pytest.mark.parametrize(
    ("method", "name"), [("grpo", "grpo"), ("gspo", "gspo"), ("cispo", "cispo")]
)
@pytest.mark.parametrize(("how", "flat"), [("sequence", "sequence_mean"), ("token", "token_mean")])
def test_padded_and_flat_losses_are_the_same(
    method: str, name: str, how: str, flat: str, hand: ModuleType
) -> None:
    losses, _ = policy_gradient_losses(A, NOW, method, old_logprobs=OLD, clip=0.2, mask=MASK)  # type: ignore[arg-type]
    padded = aggregate_padded(losses, MASK, how)  # type: ignore[arg-type]
    # CISPO bounds a weight from above and has no dual clip.
    clips = {"clip_low": None} if name == "cispo" else {"clip_low": 0.2, "dual_clip": None}
    objective = make(name, aggregation=flat, clip_high=0.2, **clips)
    row = torch.repeat_interleave(torch.arange(2), MASK.sum(1))
    rows = hand.rows(
        row, torch.zeros(5).bool(), OLD[MASK], A, logprobs=NOW[MASK].clone().requires_grad_()
    )
    found, _ = objective.loss(rows, hand.scalars_of(objective, rows))
    torch.testing.assert_close(found, padded)


def test_micro_batches_leave_their_gradients() -> None:
    leaf = NOW.clone().requires_grad_()
    loss = sft_micro_batch(leaf, MASK, accumulation_steps=2, divisor=4.0)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, -MASK.double() / (4 * 2 * 2))
    torch.testing.assert_close(loss, -(NOW * MASK).sum() / 16)
    leaf = NOW.clone().requires_grad_()
    loss, told = grpo_micro_batch(
        A, leaf, MASK, "grpo", accumulation_steps=2, old_logprobs=OLD, clip=0.2
    )
    torch.testing.assert_close(loss, torch.tensor((-1.1 + 2.2) / 4, dtype=F64))
    assert told["clipped"].tolist() == [[True, False, False], [False, True, False]]
    assert leaf.grad is not None
    # −A ρ / (tokens · rows · steps) where the clip doesn't decide.
    torch.testing.assert_close(leaf.grad[0], torch.tensor([0, -1 / 8, 0], dtype=F64))
    torch.testing.assert_close(leaf.grad[1], torch.tensor([2 / 12, 0, 3 / 12], dtype=F64))


@pytest.mark.parametrize("how", ["sequence", "constant"])
def test_a_step_does_not_depend_on_its_micro_batches(how: str, made_up: ModuleType) -> None:
    class Letters:
        pad_token_id: int | None = 0
        eos_token_id: int | None = 1

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [3 + ord(letter) - ord("a") for letter in text]

    found = []
    for parts in (1, 2, 4):
        model = made_up.tiny_model()
        loss, told = grpo_step(
            model,
            Letters(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            prompts=["ab", "ab", "c", "c"],
            responses=["d", "efg", "hi", "a"],
            advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
            accumulation_steps=parts,
            max_grad_norm=0.5,
            how=how,  # type: ignore[arg-type]
            constant=12.0,
        )
        assert told["entropy"] > 0
        assert all(parameter.grad is None for parameter in model.parameters())
        found.append((loss, told["grad_norm"], [p.detach() for p in model.parameters()]))
    for loss, norm, weights in found[1:]:
        torch.testing.assert_close(loss, found[0][0])
        assert norm == pytest.approx(found[0][1], rel=1e-5)
        torch.testing.assert_close(weights, found[0][2])
