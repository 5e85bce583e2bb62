"""Cross entropy of expert tokens, alone and beside a policy gradient, and a teacher's whole distribution."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...common.errors import ConfigError
from ...common.objectives import distillation
from ...common.objectives.keys import Aggregated, SupervisedTerm
from ..losses.aggregation import aggregate, counts
from ..losses.finite import finite, widened
from ..rows.rows import Rows
from .base import Objective, Sums, register, scored, where
from .policy import PolicyGradient


@register("sft")
class Sft(Objective):
    """Cross entropy of the expert tokens; own rows are left out."""

    settings: Aggregated
    columns = frozenset()
    plain_temperature = frozenset({"own", "expert"})

    def active(self, rows: Rows) -> Tensor:
        return rows.expert_row & rows.teaching

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        sums = counts(rows.row, rows.expert, rows.count)
        # This objective doesn't learn from own rows, so they count in no denominator.
        sums["own_tokens"] = torch.zeros_like(sums["own_tokens"])
        sums["sequences"] = rows.expert_row.sum().to(torch.float64)
        return sums

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        kept = rows.expert & rows.kept & rows.by_token(rows.teaching)
        losses = -widened(scored(rows, kept))
        total = aggregate(
            losses,
            row=rows.row,
            expert=rows.expert,
            lengths=rows.by_row(rows.expert.to(torch.int64)),
            how=self.settings.aggregation,
            scalars=scalars,
        )
        return total, {"nll": losses.detach().sum()}

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        return {"nll": sums["nll"] / max(scalars["expert_tokens"], 1.0)}


@register("rl_sft_loss")
class RlSftLoss(PolicyGradient):
    """A policy gradient on own tokens plus cross entropy of expert tokens."""

    plain_temperature = frozenset({"expert"})

    def active(self, rows: Rows) -> Tensor:
        return super().active(rows) | (rows.expert_row & rows.teaching)

    def coefficients(self, scalars: Mapping[str, float]) -> tuple[float, float]:
        """Factors of the policy gradient and of the supervised term."""
        assert isinstance(self.settings, SupervisedTerm)
        return 1.0, self.settings.sft_coefficient

    def supervised(self, logprobs: Tensor) -> Tensor:
        """``[N]`` loss of each expert token."""
        return -logprobs

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        total, sums = super().loss(rows, scalars)
        policy, sft = self.coefficients(scalars)
        kept = rows.expert & rows.kept & rows.by_token(rows.teaching)
        losses = self.supervised(widened(scored(rows, kept)))
        counted = self._likely_left_out(rows, kept)
        part = where(counted, losses).sum() / max(scalars["expert_tokens"], 1.0)
        part = sft * part
        sums["loss_expert"] = part.detach()
        if policy == 1.0:
            return total + part, sums
        for name in ("loss_own", "loss_stale"):
            sums[name] = policy * sums[name]
        return policy * total + part, sums


@register("distill")
class Distill(Objective):
    """The divergence from a teacher at own and expert tokens alike, plus cross entropy of the expert tokens."""

    settings: distillation.Distill
    columns = frozenset({"divergence"})
    plain_temperature = frozenset({"expert"})

    @property
    def needs_logprobs(self) -> bool:
        """Whether ``rows.logprobs`` must carry a gradient."""
        return self.settings.sft_coefficient != 0

    def active(self, rows: Rows) -> Tensor:
        return rows.teaching

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        if rows.divergence is None:
            raise ConfigError("distill needs the divergence from a teacher: rows.divergence")
        settings = self.settings
        kept = rows.kept & rows.by_token(rows.teaching)
        found = finite("rows.divergence", where(kept, rows.divergence))
        sums = {"divergence": found.detach().sum(), "divergence_tokens": kept.sum()}
        losses = settings.divergence_coefficient * settings.divergence_temperature**2 * found
        if self.needs_logprobs:
            nll = -widened(scored(rows, kept & rows.expert))
            losses = losses + settings.sft_coefficient * nll
            sums["nll"] = nll.detach().sum()
        total = aggregate(
            losses,
            row=rows.row,
            expert=rows.expert,
            lengths=rows.lengths,
            how=settings.aggregation,
            scalars=scalars,
        )
        return total, sums

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        figures = {"divergence": sums["divergence"] / max(sums["divergence_tokens"], 1.0)}
        if "nll" in sums:
            figures["nll"] = sums["nll"] / max(scalars["expert_tokens"], 1.0)
        return figures
