"""Preference losses over the rows of groups: the better answers against the worse ones.

Every pair of a group's rows with different rewards counts, including expert traces
(:func:`tandem.learner.losses.preferences.pairs_of_groups`). All tokens are scored at temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ...common.errors import ConfigError
from ...common.objectives import preferences
from ...common.objectives.keys import Beta
from ..losses.aggregation import counts
from ..losses.finite import finite, widened
from ..losses.preferences import cpo, dpo, kto, orpo, pairs_of_groups
from ..rows.rows import Rows
from .base import Objective, Sums, Unit, register, scored, where


class Preference(Objective):
    """What these losses share: sums and means of row log-probs, pairs, metrics."""

    settings: Beta
    unit: ClassVar[Unit] = "group"
    plain_temperature = frozenset({"own", "expert"})

    def active(self, rows: Rows) -> Tensor:
        active = torch.zeros_like(rows.masked)
        for index in self.pairs(rows):
            active[index] = True
        return active

    def pairs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """``[P]`` chosen and rejected rows; cut ones that are masked or silent, and those without a token that
        may be in the loss, are in no pair."""
        kept = torch.nonzero(rows.teaching & self.heard(rows)).squeeze(1)
        chosen, rejected = pairs_of_groups(rows.rewards[kept], rows.group[kept])
        return kept[chosen], kept[rejected]

    @staticmethod
    def heard(rows: Rows) -> Tensor:
        """``[R]`` bool: rows with a token that may be in the loss."""
        return rows.by_row((~rows.muted).to(torch.int64)) > 0

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        sums = counts(rows.row, rows.expert, rows.count)
        sums["pairs"] = torch.tensor(float(len(self.pairs(rows)[0])), dtype=torch.float64)
        return sums

    def row_sums(self, rows: Rows, which: Tensor) -> Tensor:
        """``[R]`` sums of log π_θ over the tokens of these rows that aren't muted, 0 for the other rows."""
        return rows.by_row(widened(scored(rows, self._tokens(rows, which))))

    def row_means(self, rows: Rows, which: Tensor) -> Tensor:
        """``[R]`` means of log π_θ over the same tokens, 0 for the other rows."""
        summed = rows.by_row(self._tokens(rows, which).to(torch.int64))
        return self.row_sums(rows, which) / summed.clamp(min=1)

    def reference_sums(self, rows: Rows, which: Tensor) -> Tensor:
        """``[R]`` sums of log π_ref over the same tokens, 0 for the other rows."""
        if rows.reference is None:
            raise ConfigError(
                f"{type(self).__name__.lower()} needs the log-probs of a reference: rows.reference"
            )
        known = where(self._tokens(rows, which), rows.reference.detach())
        return rows.by_row(widened(finite("rows.reference", known)))

    def _tokens(self, rows: Rows, which: Tensor) -> Tensor:
        chosen = torch.zeros(rows.count, dtype=torch.bool, device=rows.row.device)
        chosen[which] = True
        return rows.by_token(chosen) & ~rows.muted

    def pair_losses(self, rows: Rows, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """``[P]`` losses and ``[P]`` margins (for the metrics) of the pairs."""
        raise NotImplementedError

    def margins(self, rows: Rows, chosen: Tensor, rejected: Tensor) -> Tensor:
        """``[P]`` how much better the chosen row of each pair is than the rejected one; right if over 0."""
        return self.pair_losses(rows, chosen, rejected)[1]

    def compared(self, rows: Rows) -> Sums:
        """Sums for the metrics of pairs that aren't trained on, additive over groups."""
        chosen, rejected = self.pairs(rows)
        margins = self.margins(rows, chosen, rejected).detach()
        return {
            "preference_pairs": torch.tensor(float(len(chosen))),
            "preference_margin": margins.sum(),
            "preference_accuracy": (margins > 0).sum(),
        }

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        chosen, rejected = self.pairs(rows)
        losses, margins = self.pair_losses(rows, chosen, rejected)
        total = losses.sum() / max(scalars["pairs"], 1.0)
        return total, {
            "preference_loss": losses.detach().sum(),
            "preference_margin": margins.detach().sum(),
            "preference_accuracy": (margins > 0).sum(),
        }

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        pairs = max(scalars["pairs"], 1.0)
        return {
            "preference_pairs": scalars["pairs"],
            "preference_margin": sums["preference_margin"] / pairs,
            "preference_accuracy": sums["preference_accuracy"] / pairs,
        }


@register("dpo")
class Dpo(Preference):
    """``mean over pairs of −log σ(β margin)``, the margin against a reference."""

    settings: preferences.Dpo
    columns = frozenset({"reference"})

    def pair_losses(self, rows: Rows, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        which = torch.cat([chosen, rejected])
        sums, reference = self.row_sums(rows, which), self.reference_sums(rows, which)
        losses = dpo(
            sums[chosen],
            sums[rejected],
            reference[chosen],
            reference[rejected],
            beta=self.settings.beta,
            label_smoothing=self.settings.label_smoothing,
        )
        gain = sums - reference
        return losses, self.settings.beta * (gain[chosen] - gain[rejected])


@register("cpo")
class Cpo(Preference):
    """Like DPO with a uniform reference, plus the chosen answers' cross entropy."""

    settings: preferences.Cpo
    columns = frozenset()

    def pair_losses(self, rows: Rows, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        sums = self.row_sums(rows, torch.cat([chosen, rejected]))
        means = sums / rows.lengths.clamp(min=1)
        losses = cpo(
            sums[chosen],
            sums[rejected],
            means[chosen],
            beta=self.settings.beta,
            nll_coefficient=self.settings.sft_coefficient,
        )
        return losses, self.settings.beta * (sums[chosen] - sums[rejected])


@register("orpo")
class Orpo(Preference):
    """Cross entropy of the chosen answers plus a log-odds term."""

    columns = frozenset()

    def pair_losses(self, rows: Rows, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        # Odds aren't linear in the mean, so muted tokens can't count as tokens with the log-prob 0.
        means = self.row_means(rows, torch.cat([chosen, rejected]))
        losses = orpo(means[chosen], means[rejected], beta=self.settings.beta)
        return losses, means[chosen] - means[rejected]


@register("kto")
class Kto(Preference):
    """Single rows, desirable if A > 0, compared with z₀, the update's KL to the reference.

    z₀ = max(0, mean of Σ_t log π_θ/π_ref) over own rows, which are the policy's own samples. Where an update
    has none, it is the mean over every prompt with another prompt's response, as in the paper.
    """

    settings: preferences.Kto
    unit: ClassVar[Unit] = "row"
    columns = frozenset({"reference", "current"})
    mismatched = True

    def active(self, rows: Rows) -> Tensor:
        kept = rows.teaching & self.heard(rows)
        # Compared with nothing, a reward of 0 is a bad row's; compared with others, a row at their level is neither.
        return kept if self.settings.baseline == "none" else kept & (rows.advantages != 0)

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        sums = counts(rows.row, rows.expert, rows.count)
        sums["pairs"] = self.active(rows).sum().double()
        own = ~rows.expert_row & ~rows.masked & self.heard(rows)
        sums["kto_rows"] = own.sum().double()
        if rows.logprobs is not None and rows.reference is not None:
            gain = widened(rows.logprobs.detach()) - widened(rows.reference.detach())
            # Over the tokens of which the rows' own sums are made.
            per_row = rows.by_row(where(rows.by_token(own) & ~rows.muted, gain).double())
            sums["kto_gain"] = per_row.sum()
        return sums

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        which = torch.nonzero(self.active(rows)).squeeze(1)
        sums, reference = self.row_sums(rows, which), self.reference_sums(rows, which)
        z0 = self._z0(scalars)
        desirable = rows.advantages[which] > 0
        losses = kto(
            sums[which],
            reference[which],
            desirable,
            z0,
            beta=self.settings.beta,
            desirable_weight=self.settings.desirable_weight,
            undesirable_weight=self.settings.undesirable_weight,
        )
        margins = (sums - reference)[which] - z0
        margins = self.settings.beta * torch.where(desirable, margins, -margins)
        return losses.sum() / max(scalars["pairs"], 1.0), {
            "preference_loss": losses.detach().sum(),
            "preference_margin": margins.detach().sum(),
            "preference_accuracy": (margins > 0).sum(),
        }

    def margins(self, rows: Rows, chosen: Tensor, rejected: Tensor) -> Tensor:
        which = torch.cat([chosen, rejected])
        gain = self.row_sums(rows, which) - self.reference_sums(rows, which)
        return self.settings.beta * (gain[chosen] - gain[rejected])

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        return {**super().report(sums, scalars), "kto_z0": self._z0(scalars)}

    @staticmethod
    def _z0(scalars: Mapping[str, float]) -> float:
        gain = scalars.get("kto_gain", 0.0) + scalars.get("mismatched_gain", 0.0)
        count = scalars["kto_rows"] + scalars.get("mismatched_rows", 0.0)
        return max(gain / max(count, 1.0), 0.0)
