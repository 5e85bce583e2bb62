"""A teacher's next tokens in the place of rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .keys import (
    AboveZero,
    Aggregated,
    Aggregation,
    ObjectiveConfig,
    Share,
    SupervisedTerm,
)


@dataclass(frozen=True, kw_only=True)
class Distill(SupervisedTerm, Aggregated):
    """Knowledge distillation: a teacher's distribution over the whole vocabulary, at every token."""

    name: Literal["distill"] = "distill"
    divergence_coefficient: AboveZero = 1.0
    """Coefficient of distill's divergence from the teacher."""
    divergence_temperature: AboveZero = 1.0
    """T by which distill divides the logits of both models; T² in the loss keeps the gradient's size."""
    divergence_mix: Share = 0.0
    """β of distill's divergence D: 0 = KL(teacher‖π), which covers all that the teacher may say; 1 = KL(π‖teacher),
    which settles on a part of it; between = β KL(teacher‖M) + (1 − β) KL(π‖M), M = β teacher + (1 − β) π."""
    sft_coefficient: float = 0.0
    aggregation: Aggregation = "token_mean"

    equation = "L = agg( c_D T² D(teacher, π_θ) + c · 1[expert] (−log π_θ) ), the softmaxes in D of logits / T"
    source = (
        "Hinton et al., arXiv 1503.02531, section 2; own samples and the mixed divergence: GKD, arXiv 2306.13649, "
        "algorithm 1 and eq. 1; no gradient through the sampling"
    )
    use = (
        "A larger model with the same tokenizer (learner.teacher). On its own or other traces with `tandem offline`, on "
        "own samples whatever they are paid, or on both with expert.per_group."
    )
    needs = ("divergence",)
    alone = "always"


KINDS: tuple[type[ObjectiveConfig], ...] = (Distill,)
