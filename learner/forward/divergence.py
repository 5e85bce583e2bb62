"""The divergence between a teacher's and the policy's next tokens, over the whole vocabulary.

It is computed from hidden states and output matrices, for one slice of the vocabulary at a time, forward and again
backward, so that the logits of a whole micro-batch never exist: see :mod:`.logprobs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .head import Head
from .logprobs import (
    CHUNK_BYTES,
    CHUNKED_FROM,
    LEAST_SLICE,
    SlicedGradients,
    _factors,
    _slice_logits,
)

COPIES = 8
"""Tensors of a slice's size that exist at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """What a forward pass of the policy needs of the teacher."""

    hidden: Tensor
    """``[N, H_t]`` the teacher's hidden states at the positions that predict the tokens, without gradient."""
    head: Head
    """The teacher's output head."""
    temperature: float
    """T of both softmaxes."""
    mix: float
    """β: 0 = KL(teacher‖policy), 1 = KL(policy‖teacher), between = the generalised Jensen-Shannon divergence."""
    logprobs: bool
    """Whether the log-probs of the tokens carry a gradient, too."""


def token_divergence(
    hidden: Tensor, head: Head, lesson: Lesson, *, size: int | None = None
) -> Tensor:
    """``D(p ‖ q)`` at each position, with p the teacher's and q the policy's softmax(logits / T).

    With M = β p + (1 − β) q it is β KL(p‖M) + (1 − β) KL(q‖M) for 0 < β < 1 (GKD, arXiv 2306.13649, eq. 1), KL(p‖q)
    for β = 0 and KL(q‖p) for β = 1. Both softmaxes are over the token ids that both output matrices have: what one of
    them has beyond these is padding, since the tokenizer is the same.

    Args:
        hidden: ``[N, H]`` the policy's hidden states, at the same positions as the lesson's.
        head: the policy's output head.
        lesson: what the teacher says there; it gets no gradient.
        size: columns of a slice; None = by the size of the vocabulary.

    Returns:
        ``[N]`` in nats, without a factor T²; float32, or float64 for float64 inputs.
    """
    width = min(head.weight.shape[0], lesson.head.weight.shape[0])
    if size is None:
        size = width
        if width >= CHUNKED_FROM:
            # A slice of the log-probs' size, as all tensors of it together.
            room = CHUNK_BYTES.get(hidden.device.type, 64 << 20) * 3 // COPIES
            columns = room // (4 * max(len(hidden), 1))
            size = max(columns // LEAST_SLICE, 1) * LEAST_SLICE
    found: Tensor = _Divergence.apply(hidden, head.weight, head.bias, head, lesson, width, size)
    return found


def _terms(teacher: Tensor, policy: Tensor, mix: float) -> tuple[Tensor, Tensor]:
    """``[N, v]`` addends of the divergence, and its slopes by the policy's log-probs.

    Slopes are up to a multiple of q, which the softmax takes out again.

    Args:
        teacher: ``[N, v]`` log p.
        policy: ``[N, v]`` log q.
        mix: β.
    """
    p, q = teacher.exp(), policy.exp()
    if mix == 0:
        return _times(p, teacher, policy), -p
    if mix == 1:
        found = _times(q, policy, teacher)
        return found, found
    middle = torch.logaddexp(teacher + math.log(mix), policy + math.log1p(-mix))
    own = _times(q, policy, middle).mul_(1 - mix)
    return _times(p, teacher, middle).mul_(mix).add_(own), own


def _times(share: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """``share · (one − other)``, and 0 where the share is, although a difference of log-probs may be infinite."""
    return torch.where(share > 0, share * (one - other), torch.zeros_like(share))


class _Divergence(torch.autograd.Function):
    """Keeps hidden states, matrices, logsumexps and the sum of slopes; computes the logits again in backward.

    With g the slopes by log q, the gradient by the policy's logits is (g − q Σ g) times what multiplies these.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        lesson: Lesson,
        width: int,
        size: int,
    ) -> Tensor:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        count = len(hidden)
        lowest = hidden.new_full((count,), -torch.inf, dtype=dtype)
        heat = None if lesson.temperature == 1 else torch.full_like(lowest, lesson.temperature)
        sides = (
            (lesson.hidden, lesson.head.weight, lesson.head.bias, lesson.head),
            (hidden, weight, bias, head),
        )
        made = []
        for states, matrix, offset, of in sides:
            scaled, bend = _factors(heat, of.scale, of.cap, lowest)
            norms = lowest
            for part in _slices(width, size):
                logits = _slice_logits(states, matrix, offset, part, bend, scaled)
                norms = torch.logaddexp(norms, logits.logsumexp(1))
            made.append((scaled, bend, norms))
        (teacher_heat, teacher_bend, teacher_norms), (own_heat, own_bend, own_norms) = made
        ctx.lesson, ctx.width, ctx.size = lesson, width, size
        ctx.bends = teacher_bend, own_bend
        total, slope = torch.zeros_like(lowest), torch.zeros_like(lowest)
        saved = (hidden, weight, bias, teacher_heat, own_heat, teacher_norms, own_norms)
        for part in _slices(width, size):
            addends, slopes = _terms(*_both(ctx, saved, part), lesson.mix)
            total += addends.sum(1)
            slope += slopes.sum(1)
        ctx.save_for_backward(*saved, slope)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (by_divergence,) = gradients
        *saved, slope = ctx.saved_tensors
        hidden, weight, bias, _, heat, _, norms = saved
        # Rows beyond the common ids are in no slice.
        sums = SlicedGradients(ctx, hidden, weight, bias, norms.dtype, ctx.width)
        bend = ctx.bends[1]
        for part in _slices(ctx.width, ctx.size):
            teacher, policy = _both(ctx, saved, part)
            _, slopes = _terms(teacher, policy, ctx.lesson.mix)
            grad = (slopes - policy.exp() * slope[:, None]).mul_(by_divergence[:, None])
            if heat is not None:
                grad.mul_(heat)
            if bend is not None:
                # 1 − tanh², from heat · tanh.
                bent = ((policy + norms[:, None]) / heat).square_().neg_().add_(1)
                grad.mul_(bent.mul_(bend))
            sums.add(part, grad, grad.to(hidden.dtype))
        return *sums.found(), None, None, None, None


def _slices(width: int, size: int) -> Iterator[slice]:
    for start in range(0, width, size):
        yield slice(start, min(start + size, width))


def _both(ctx: Any, saved: Any, part: slice) -> tuple[Tensor, Tensor]:
    """``[N, v]`` log p and log q of a slice."""
    hidden, weight, bias, teacher_heat, own_heat, teacher_norms, own_norms = saved
    lesson = ctx.lesson
    of_teacher, own_bend = ctx.bends
    teacher = _slice_logits(
        lesson.hidden, lesson.head.weight, lesson.head.bias, part, of_teacher, teacher_heat
    )
    policy = _slice_logits(hidden, weight, bias, part, own_bend, own_heat)
    return teacher.sub_(teacher_norms[:, None]), policy.sub_(own_norms[:, None])
