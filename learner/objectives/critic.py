"""PPO with a critic: advantages of single tokens, and the critic's loss beside the policy's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...common.errors import ConfigError
from ...common.objectives import plain
from ..losses.finite import finite
from ..losses.penalties import value_loss
from ..rows.rows import Rows
from .base import Sums, register, where
from .policy import PolicyGradient


@register("ppo")
class Ppo(PolicyGradient):
    """``agg(clip(ρ, A_t)) + c_V · mean_own(½ max((V − G)², …))`` with A_t and G by GAE."""

    settings: plain.Ppo
    columns = frozenset({"behaviour", "values"})

    def active(self, rows: Rows) -> Tensor:
        return ~rows.masked

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        if (
            rows.values is None
            or rows.old_values is None
            or rows.returns is None
            or rows.token_advantages is None
        ):
            raise ConfigError(
                "ppo needs a critic's values and what GAE makes of them: rows.values, old_values, "
                "returns and token_advantages"
            )
        total, sums = super().loss(rows, scalars)
        own = ~rows.expert & ~rows.by_token(rows.masked)
        losses = value_loss(
            finite("rows.values", where(own, rows.values)),
            where(own, rows.old_values),
            where(own, rows.returns),
            self.settings.value_clip,
        )
        part = where(own, losses).sum() / max(scalars["own_tokens"], 1.0)
        sums["loss_value"] = part.detach()
        return total + self.settings.value_coefficient * part, sums
