"""Preferences: the better answers of a group against the worse ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .keys import BelowHalf, Beta, Learned, ObjectiveConfig, SupervisedTerm


@dataclass(frozen=True, kw_only=True)
class Pairs(Beta):
    """Compares two rows of a group with each other."""

    unit = "group"

    @property
    def rejects(self) -> bool:
        return True

    @property
    def least_verdicts(self) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class Dpo(Pairs):
    """DPO on pairs of a group's rows."""

    name: Literal["dpo"] = "dpo"
    label_smoothing: BelowHalf = 0.0
    """Share of pairs whose labels dpo assumes to be wrong."""

    equation = "L = mean_pairs( −log σ(β [(log π_w − log π_l) − (log ref_w − log ref_l)]) )"
    source = "arXiv 2305.18290, eq. 7; label smoothing: conservative DPO"
    trl = "equal to the loss `sigmoid` of TRL 1.16, which leaves label smoothing out"
    use = "Preferences, or verifiable rewards as preferences, offline or online."
    needs = ("reference",)


@dataclass(frozen=True, kw_only=True)
class Kto(Beta, Learned):
    """KTO on single rows, good or bad."""

    name: Literal["kto"] = "kto"
    desirable_weight: float = 1.0
    """Weight λ_D of kto."""
    undesirable_weight: float = 1.0
    """Weight λ_U of kto."""

    equation = "L = mean_rows( λ_D (1 − σ(β (r − z₀))) or λ_U (1 − σ(β (z₀ − r))) ), r = log π/ref, z₀ = sg(KL) of the update"
    source = "arXiv 2402.01306, eq. 8; z₀ from own samples, or offline from prompts with other prompts' responses"
    trl = (
        "equal to TRL 1.16 on one batch of one rank, where chosen rows come first; z₀ is that of the whole "
        "update here, and of each rank's batch there"
    )
    use = (
        "Thumbs up and down without pairs. A row is good if its advantage is above 0 and bad if it is below; with "
        "`advantage=none`, where the advantage is the reward, one of 0 is bad too."
    )
    needs = ("reference", "current")
    alone = "by advantage"

    @property
    def rejects(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Orpo(Pairs):
    """ORPO: cross entropy and log-odds, no reference."""

    name: Literal["orpo"] = "orpo"

    equation = "L = mean_pairs( −m_w − β log σ(log odds_w − log odds_l) ), m = mean log π"
    source = "arXiv 2403.07691, eq. 6-7"
    trl = (
        "equal to TRL 1.16 where prompts have one token and chosen responses one length: its cross entropy "
        "goes over prompt and response and is averaged over a batch's tokens, here over the response alone and "
        "each response first"
    )
    use = "Preferences from a base model in one stage."
    needs = ()


@dataclass(frozen=True, kw_only=True)
class Cpo(SupervisedTerm, Pairs):
    """CPO: DPO without a reference, plus cross entropy."""

    name: Literal["cpo"] = "cpo"

    equation = "L = mean_pairs( −log σ(β (log π_w − log π_l)) − c · mean log π_w )"
    source = "arXiv 2401.08417, eq. 3-5"
    trl = (
        "equal to TRL 1.16 where chosen responses have one length: its cross entropy is averaged over a batch's "
        "tokens, here over each response first"
    )
    use = "As dpo, where a reference model doesn't fit."
    needs = ()


KINDS: tuple[type[ObjectiveConfig], ...] = (
    Dpo,
    Kto,
    Orpo,
    Cpo,
)
