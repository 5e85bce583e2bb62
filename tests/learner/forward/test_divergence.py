"""The divergence from a teacher in slices of the vocabulary is the one of its definition, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.learner.forward import divergence
from tandem.learner.forward.divergence import Lesson, token_divergence
from tandem.learner.forward.head import Head

TOKENS = 6


def head_of(ids: int, hidden: int, seed: int, *, scale: float = 1.0, cap: Any = None) -> Head:
    torch.manual_seed(seed)
    return Head(layer=nn.Linear(hidden, ids).double(), scale=scale, cap=cap)


def states_of(hidden: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(TOKENS, hidden, generator=generator, dtype=torch.float64)


def logits_of(states: Tensor, head: Head) -> Tensor:
    made = states @ head.weight.T
    if head.bias is not None:
        made = made + head.bias
    made = made * head.scale
    return made if head.cap is None else head.cap * torch.tanh(made / head.cap)


def by_definition(teacher: Tensor, policy: Tensor, heat: float, mix: float) -> Tensor:
    """``[N]`` divergences of ``[N, V]`` logits over the same ids."""
    p, q = torch.softmax(teacher / heat, -1), torch.softmax(policy / heat, -1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(-1)

    if mix in (0, 1):
        return kl(q, p) if mix else kl(p, q)
    middle = mix * p + (1 - mix) * q
    return mix * kl(p, middle) + (1 - mix) * kl(q, middle)


def lesson_of(states: Tensor, head: Head, heat: float = 1.0, mix: float = 0.0) -> Lesson:
    return Lesson(hidden=states, head=head, temperature=heat, mix=mix, logprobs=False)


@pytest.mark.parametrize("mix", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("heat", [1.0, 2.0])
@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("ids", [(23, 23), (23, 29), (29, 23)], ids=["same", "teacher", "policy"])
def test_value_and_gradient_are_those_of_the_definition(
    ids: tuple[int, int], size: int | None, heat: float, mix: float
) -> None:
    """One of the two may have padded its output; the teacher's caps its logits, and the policy's scales them."""
    own, theirs = head_of(ids[0], 8, 1, scale=0.5), head_of(ids[1], 12, 2, cap=4.0)
    states, known = states_of(8, 3).requires_grad_(), states_of(12, 4)
    weights = torch.rand(TOKENS, dtype=torch.float64)
    leaves = (states, own.weight, own.bias)
    expected = by_definition(
        logits_of(known, theirs)[:, :23].detach(), logits_of(states, own)[:, :23], heat, mix
    )
    slopes = torch.autograd.grad((weights * expected).sum(), leaves)
    found = token_divergence(states, own, lesson_of(known, theirs, heat, mix), size=size)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    for one, other in zip(
        torch.autograd.grad((weights * found).sum(), leaves), slopes, strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_a_cap_of_the_policys_logits_bends_the_gradient(mix: float) -> None:
    own, theirs = head_of(23, 8, 1, scale=0.7, cap=2.0), head_of(23, 12, 2)
    states, known = states_of(8, 3).requires_grad_(), states_of(12, 4)
    lesson = lesson_of(known, theirs, 2.0, mix)
    assert torch.autograd.gradcheck(lambda s: token_divergence(s, own, lesson, size=5), (states,))


def test_the_teacher_gets_no_gradient() -> None:
    own, theirs = head_of(23, 8, 1), head_of(23, 12, 2)
    known = states_of(12, 4).requires_grad_()
    token_divergence(states_of(8, 3), own, lesson_of(known, theirs)).sum().backward()
    assert own.weight.grad is not None
    assert known.grad is None
    assert theirs.weight.grad is None


def forbidding(head: Head, *ids: int) -> Head:
    with torch.no_grad():
        head.layer.bias[list(ids)] = -torch.inf  # type: ignore[index, operator]
    return head


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_an_id_that_both_forbid_adds_nothing(mix: float) -> None:
    own, theirs = forbidding(head_of(23, 8, 1), 2, 3), forbidding(head_of(23, 12, 2), 2, 3)
    states, known = states_of(8, 3).requires_grad_(), states_of(12, 4)
    rest = [number for number in range(23) if number not in (2, 3)]
    expected = by_definition(
        logits_of(known, theirs)[:, rest], logits_of(states, own)[:, rest], 1.0, mix
    )
    found = token_divergence(states, own, lesson_of(known, theirs, mix=mix), size=4)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    (slope,) = torch.autograd.grad(found.sum(), (states,))
    assert slope.isfinite().all()


def test_only_the_divergence_from_the_policy_is_infinite_where_the_teacher_forbids_an_id() -> None:
    own, theirs = head_of(23, 8, 1), forbidding(head_of(23, 12, 2), 2)
    states, known = states_of(8, 3), states_of(12, 4)
    found = [token_divergence(states, own, lesson_of(known, theirs, mix=m)) for m in (0, 0.5, 1)]
    assert [bool(one.isinf().all()) for one in found] == [False, False, True]
    assert found[0].isfinite().all()
    assert found[1].isfinite().all()


def test_logits_of_a_large_vocabulary_exist_in_slices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, room = divergence.CHUNKED_FROM + 100, 64 << 10
    widths: list[int] = []
    plain = divergence._slice_logits

    def watched(*args: Any) -> Tensor:
        found = plain(*args)
        widths.append(found.shape[1])
        return found

    monkeypatch.setattr(divergence, "CHUNK_BYTES", {"cpu": room})
    monkeypatch.setattr(divergence, "_slice_logits", watched)
    own, theirs = head_of(ids, 8, 1), head_of(ids, 12, 2)
    states, known = states_of(8, 3).requires_grad_(), states_of(12, 4)
    found = token_divergence(states, own, lesson_of(known, theirs, mix=0.5))
    (slope,) = torch.autograd.grad(found.sum(), (states,))
    assert max(widths) * 4 * TOKENS * divergence.COPIES <= 3 * room
    expected = by_definition(logits_of(known, theirs), logits_of(states, own), 1.0, 0.5)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), (states,))[0])
