"""Objectives for stale samples: weights against the policy that sampled them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .keys import (
    AboveZero,
    Correction,
    CorrectionLevel,
    DualClip,
    NonNegative,
    ObjectiveConfig,
    Weighed,
)


@dataclass(frozen=True, kw_only=True)
class Tis(Weighed):
    """Truncated importance sampling: a policy gradient weighted by min(ρ, C)."""

    name: Literal["tis"] = "tis"
    correction: Correction = "truncate"
    correction_high: AboveZero = 2.0

    equation = "L = agg_own( −sg(min(π_θ/μ, C)) A log π_θ )"
    source = "IMPALA, arXiv 1802.01561; Yao et al. 2025, “Your efficient RL framework secretly brings you off-policy RL training”"
    use = "Differences of numerics between engine and learner. It bounds the weight from above only: on samples several steps old it collapses."


@dataclass(frozen=True, kw_only=True)
class Icepop(Weighed):
    """IcePop: tokens on which engine and learner disagree leave the gradient."""

    name: Literal["icepop"] = "icepop"
    correction: Correction = "mask"
    correction_low: NonNegative = 0.5
    correction_high: AboveZero = 5.0

    equation = "L = agg_own( −sg(M(π_θ/μ)) A log π_θ ), M(k) = k where α ≤ k ≤ β, else 0"
    source = "INTELLECT-3, arXiv 2512.16144, eq. 1, with the α = 0.5 and β = 5 of Ring-1T, arXiv 2510.18855, where the mask stands before PPO's clip: decoupled_ppo with correction=mask"
    use = "Mixture-of-experts models, quantised engines."


@dataclass(frozen=True, kw_only=True)
class Mis(Weighed):
    """Masked importance sampling: sequences that have drifted too far leave."""

    name: Literal["mis"] = "mis"
    correction: Correction = "mask"
    correction_level: CorrectionLevel = "sequence"
    correction_low: NonNegative = 0.0
    correction_high: AboveZero = 2.0

    equation = "L = agg_own( −sg(w 1[w ≤ C]) A log π_θ ), w = Π_t π_θ/μ over the sequence"
    source = "Liu et al. 2025, “When speed kills stability”; token level: correction_level=token"
    use = "Long runs on a mismatched engine, where truncation lets bad sequences through."


@dataclass(frozen=True, kw_only=True)
class DecoupledPpo(DualClip, Weighed):
    """Decoupled PPO: the clip is around the step's first weights, stale samples are weighted apart."""

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    correction: Correction = "truncate"
    correction_high: AboveZero = 2.0

    equation = "L = agg_own( sg(w(π_prox/μ)) · clip(π_θ/π_prox, A) ), w capped or masked"
    source = "AReaL, arXiv 2505.24298, eq. 5; Hilton et al., arXiv 2110.00641"
    use = "Samples several steps old with several updates a step. It can't be had without its behaviour weight (correction=none is refused)."
    needs = ("behaviour", "proximal")


KINDS: tuple[type[ObjectiveConfig], ...] = (
    Tis,
    Icepop,
    Mis,
    DecoupledPpo,
)
