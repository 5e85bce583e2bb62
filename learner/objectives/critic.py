"""PPO with a critic: advantages of single tokens, and the critic's loss beside the policy's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...common.errors import ConfigError
from ...common.objectives import plain
from ..losses.finite import finite
from ..losses.penalties import kl_in_reward, value_loss
from ..losses.returns import explained_variance, gae, whitened
from ..rows.rows import Rows
from .base import Sums, register, where
from .policy import PolicyGradient


@register("ppo")
class Ppo(PolicyGradient):
    """``agg(clip(ρ, A_t))``, and for the critic ``c_V · mean_own(½ max((V − G)², …))``, with A_t and G by GAE.

    The policy and a critic on a backbone of its own share no parameter, so that the two terms are trained
    apart: :meth:`loss` and :meth:`value_loss`. If rows have ``values``, the loss is the sum of both.
    """

    settings: plain.Ppo
    columns = frozenset({"behaviour", "values"})

    def active(self, rows: Rows) -> Tensor:
        return ~rows.masked

    def estimated(
        self, rows: Rows, values: Tensor, coefficient: float = 0.0
    ) -> tuple[Rows, dict[str, float]]:
        """A step's rows with advantages and returns of their tokens, and figures of the critic.

        Rows that teach nothing become masked: those with expert tokens, which no policy of the run sampled,
        and those whose advantage the truncation sets to 0.

        Args:
            rows: all rows of the step; with ``reference`` if there is a coefficient.
            values: ``[N]`` V of the state before each token, by the critic at the step's start.
            coefficient: β of the KL in the reward, which each own token pays.
        """
        settings = self.settings
        masked = ~rows.teaching | rows.expert_row
        counted = ~(masked[rows.row] | rows.muted)
        rewards = rows.earned(rows.rewards)
        figures: dict[str, float] = {}
        if coefficient:
            assert rows.reference is not None
            own = ~rows.expert
            behaviour, reference = where(own, rows.behaviour), where(own, rows.reference)
            penalty = kl_in_reward(behaviour, reference, settings.kl_reward_form)
            rewards = rewards - coefficient * penalty.to(rewards.dtype)
            gap = float((behaviour - reference).double().sum())
            figures["k1_reference"] = gap / max(int(own.sum()), 1)
        if settings.whiten_rewards:
            rewards = whitened(rewards, counted, shift_mean=False)
        advantages, returns = gae(
            rewards, values.double(), rows.row, gamma=settings.discount, lam=settings.gae_lambda
        )
        among, known = returns[counted], values[counted].double()
        if len(among):
            figures |= {
                "value_mean": float(known.mean()),
                "return_mean": float(among.mean()),
                "explained_variance": explained_variance(known, among),
            }
        if settings.whiten:
            advantages = whitened(advantages, counted)
        filled = rows.with_columns(
            masked=masked,
            old_values=values,
            returns=returns.to(values.dtype),
            token_advantages=advantages.to(values.dtype),
        )
        return filled, figures

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        if rows.token_advantages is None:
            raise ConfigError(
                "ppo needs what GAE makes of a critic's values: rows.token_advantages, old_values and "
                "returns"
            )
        total, sums = super().loss(rows, scalars)
        if rows.values is None:
            return total, sums
        part, more = self.value_loss(rows, scalars)
        return total + part, sums | more

    def value_loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        """The contribution of these rows to the critic's loss, ``value_coefficient`` included, and sums for
        the metrics; see :meth:`Objective.loss`."""
        if rows.values is None or rows.old_values is None or rows.returns is None:
            raise ConfigError("a critic's loss needs rows.values, old_values and returns")
        settings = self.settings
        own = ~rows.expert & rows.kept
        values = finite("rows.values", where(own, rows.values))
        old_values = where(own, rows.old_values)
        returns = finite("rows.returns", where(own, rows.returns))
        losses = value_loss(values, old_values, returns, settings.value_clip)
        part = where(own, losses).sum() / max(scalars["own_tokens"], 1.0)
        sums = {"loss_value": part.detach()}
        if settings.value_clip is not None:
            far = (values.detach() - old_values).abs() > settings.value_clip
            sums["value_clipped"] = (own & far).sum()
        return settings.value_coefficient * part, sums

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        # While the critic is trained alone, there are sums of its own only.
        alone = "loss_own" not in sums
        metrics = {"loss_value": sums["loss_value"]} if alone else super().report(sums, scalars)
        if "value_clipped" in sums:
            tokens = max(scalars["own_tokens"], 1.0)
            metrics["value_clip_fraction"] = sums["value_clipped"] / tokens
        return metrics

    def clipped(self, rows: Rows, log_ratios: Tensor) -> Tensor:
        if rows.token_advantages is None:
            return torch.zeros_like(rows.expert)
        return super().clipped(rows, log_ratios)
