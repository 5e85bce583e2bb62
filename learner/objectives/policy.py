"""Policy gradients on own tokens: what they all share, and the plain ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...common.errors import ConfigError
from ...common.objectives.keys import (
    Clip,
    Clipped,
    DualClip,
    ExpertWeight,
    OwnTokens,
    Policy,
    Weighed,
)
from ..losses.aggregation import aggregate
from ..losses.finite import NonFiniteError, finite, widened
from ..losses.penalties import kl_in_loss, scaled_coefficient
from ..losses.ratios import (
    cispo,
    clip_surrogate,
    correction_weights,
    log_ratio,
    sequence_log_ratio,
)
from ..losses.shaping import own_ratios
from ..rows.rows import Rows
from .base import Objective, Sums, register, scored, where


class PolicyGradient(Objective):
    """``L = agg(ℓ_own) + agg(ℓ_expert) − c_H mean(H) + β agg(KL)``.

    A subclass defines the loss of an own token (:meth:`own_losses`, or of the clipped surrogate only the ratio,
    :meth:`clip_ratios`) and of an expert token (:meth:`expert_losses`). Advantages, masks and denominators: :mod:`tandem.learner.losses.advantages`,
    :mod:`tandem.learner.losses.aggregation`.
    """

    settings: Policy
    clips_own = True

    def __init__(self, settings: Policy) -> None:
        super().__init__(settings)
        if settings.kl_coefficient:
            self.columns = self.columns | {"reference"}
        if settings.entropy_coefficient and settings.scales_entropy:
            self.columns = self.columns | {"current"}

    def active(self, rows: Rows) -> Tensor:
        if self.needs_entropy or self.settings.kl_coefficient:
            return torch.ones_like(rows.masked)
        moving = rows.advantages
        if rows.token_advantages is not None:
            moving = rows.by_row(rows.token_advantages.abs())
        return (moving != 0) & ~rows.masked

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        sums = super().statistics(rows)
        if self.needs_entropy and "current" in self.columns and rows.entropy is not None:
            over = self._entropy_mask(rows)
            sums["entropy_sum"] = where(over, rows.entropy.detach()).sum().double()
            sums["entropy_tokens"] = over.sum().double()
        return sums

    # For subclasses to define.

    def own_losses(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> Tensor:
        """``[N]`` loss of each own token (for other tokens any finite value).

        Args:
            rows: rows with all columns.
            logprobs: ``[N]`` log π_θ of own tokens, 0 for the others.
            behaviour: ``[N]`` log μ of own tokens, 0 for the others.
            advantages: ``[N]`` advantages.
            own: ``[N]`` bool, own tokens.
        """
        return clip_surrogate(
            self.clip_ratios(rows, logprobs, behaviour, own), advantages, **self.clips
        )

    def clip_ratios(self, rows: Rows, logprobs: Tensor, behaviour: Tensor, own: Tensor) -> Tensor:
        """``[N]`` the ratio of each own token that the clip bounds (for other tokens any finite value): π_θ/μ,
        shaped if the settings say so. Arguments are those of :meth:`own_losses`."""
        settings = self.settings
        if isinstance(settings, Clipped) and settings.own_shaping != "none":
            return own_ratios(
                logprobs,
                behaviour,
                settings.own_shaping,
                gamma=settings.gamma,
                exponent=settings.shaping_exponent,
                coefficient=settings.shaping_coefficient,
            )
        return log_ratio(logprobs, behaviour).exp()

    def expert_losses(
        self, rows: Rows, logprobs: Tensor, advantages: Tensor, expert: Tensor
    ) -> tuple[Tensor, Tensor | None] | None:
        """``[N]`` loss of each expert token (for other tokens any finite value), and its weight for the
        metrics; None = expert tokens are left out."""
        return None

    def expert_mask(self, rows: Rows, advantages: Tensor) -> Tensor:
        """``[N]`` bool: expert tokens in the loss.

        Those with A < 0 would make the expert's own text less likely; they are left out by default.
        """
        kept = rows.expert & rows.kept
        return kept if self.expert_negative else kept & (advantages >= 0)

    # Shared by all.

    @property
    def clips(self) -> dict[str, float | None]:
        """Keyword arguments of the clipped surrogate; None if the objective has no such key."""
        settings = self.settings
        return {
            "clip_low": settings.clip_low if isinstance(settings, Clip) else None,
            "clip_high": settings.clip_high if isinstance(settings, Clip) else None,
            "dual_clip": settings.dual_clip if isinstance(settings, DualClip) else None,
        }

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        assert rows.logprobs is not None
        settings = self.settings
        per_token = self.token_advantages(rows)
        kept = rows.kept
        own = kept & ~rows.expert
        logprobs = widened(scored(rows, own))
        behaviour = where(own, rows.behaviour)
        weight = settings.own_advantage_weight if isinstance(settings, OwnTokens) else 1.0
        own_advantages = _scaled(per_token, weight)
        losses = self.own_losses(rows, logprobs, behaviour, own_advantages, own)
        counted = self._likely_left_out(rows, own)
        own_losses = where(counted, losses)
        sums = self._clip_sums(rows, logprobs.detach(), behaviour, per_token, own)
        divided = self.divisors(scalars)
        total = self.aggregate(rows, own_losses, divided)
        sums["loss_own"] = total.detach()
        stale = own & (rows.lag > 0)
        sums["loss_stale"] = self.aggregate(rows, where(stale, own_losses.detach()), divided)
        expert = self.expert_mask(rows, per_token)
        part = self._expert_part(rows, expert, per_token, scalars, sums)
        if part is not None:
            total = total + part
        if settings.kl_coefficient:
            beta = scalars.get("kl_coefficient", settings.kl_coefficient)
            total = total + beta * self._kl(rows, logprobs, behaviour, own, scalars, sums)
        if self.needs_entropy:
            total = total - self._entropy_bonus(rows, scalars)
        return total, sums

    def token_advantages(self, rows: Rows) -> Tensor:
        """``[N]`` advantages in the log-probs' dtype (float32 for bf16): per token if there are such."""
        assert rows.logprobs is not None
        dtype = widened(rows.logprobs).dtype
        if rows.token_advantages is not None:
            return rows.token_advantages.to(dtype)
        return rows.by_token(rows.advantages.to(dtype))

    def divisors(self, scalars: Mapping[str, float]) -> Mapping[str, float]:
        """Scalars whose counts divide the losses of own and expert tokens; entropy and KL keep their own."""
        return scalars

    def aggregate(self, rows: Rows, losses: Tensor, scalars: Mapping[str, float]) -> Tensor:
        """See :func:`tandem.learner.losses.aggregation.aggregate`."""
        return aggregate(
            losses,
            row=rows.row,
            expert=rows.expert,
            lengths=rows.lengths,
            how=self.settings.aggregation,
            scalars=scalars,
        )

    def _likely_left_out(self, rows: Rows, mask: Tensor) -> Tensor:
        """Removes tokens that are more likely than ``max_probability``; denominators keep them."""
        most = self.settings.max_probability
        if most is None:
            return mask
        assert rows.logprobs is not None
        return mask & (where(mask, rows.logprobs.detach()).exp() <= most)

    def _expert_part(
        self,
        rows: Rows,
        expert: Tensor,
        per_token: Tensor,
        scalars: Mapping[str, float],
        sums: Sums,
    ) -> Tensor | None:
        settings = self.settings
        weight = settings.expert_advantage_weight if isinstance(settings, ExpertWeight) else 1.0
        advantages = _scaled(per_token, weight)
        expert_part = self.expert_losses(rows, widened(scored(rows, expert)), advantages, expert)
        if expert_part is None:
            return None
        losses, weights = expert_part
        counted = self._likely_left_out(rows, expert)
        part = self.aggregate(rows, where(counted, losses), self.divisors(scalars))
        sums["loss_expert"] = part.detach()
        if weights is not None:
            sums["expert_weight"] = where(expert, weights.detach()).sum()
            sums["expert_weighted"] = expert.sum()
        return part

    def _kl(
        self,
        rows: Rows,
        logprobs: Tensor,
        behaviour: Tensor,
        own: Tensor,
        scalars: Mapping[str, float],
        sums: Sums,
    ) -> Tensor:
        if rows.reference is None:
            raise ConfigError("kl_coefficient needs the log-probs of a reference: rows.reference")
        penalties = kl_in_loss(
            logprobs,
            finite("rows.reference", where(own, rows.reference)),
            self.settings.kl_form,
            log_ratios=log_ratio(logprobs, behaviour),
        )
        part = self.aggregate(rows, where(own, penalties), scalars)
        sums["loss_kl"] = part.detach()
        return part

    def _entropy_mask(self, rows: Rows) -> Tensor:
        kept = rows.kept
        return kept if self.settings.entropy_over == "all" else kept & ~rows.expert

    def _entropy_bonus(self, rows: Rows, scalars: Mapping[str, float]) -> Tensor:
        """``c_H`` times these tokens' share of the mean entropy over the update."""
        settings = self.settings
        assert rows.entropy is not None
        tokens = scalars["own_tokens"]
        if settings.entropy_over == "all":
            tokens = tokens + scalars["expert_tokens"]
        entropy = finite("rows.entropy", where(self._entropy_mask(rows), rows.entropy))
        mean = entropy.sum() / max(tokens, 1.0)
        coefficient = scalars.get("entropy_coefficient", settings.entropy_coefficient)
        if settings.entropy_target is not None and settings.scales_entropy:
            measured = scalars["entropy_sum"] / max(scalars["entropy_tokens"], 1.0)
            coefficient = scaled_coefficient(coefficient, settings.entropy_target, measured)
        return coefficient * mean

    def clipped(self, rows: Rows, log_ratios: Tensor) -> Tensor:
        advantages = rows.token_advantages
        if advantages is None:
            advantages = rows.by_token(rows.advantages)
        own = ~rows.expert & rows.kept
        behaviour = where(own, rows.behaviour.to(log_ratios.dtype))
        logprobs = where(own, log_ratios) + behaviour
        try:
            above, below, far = self._clip_decides(rows, logprobs, behaviour, advantages, own)
        except NonFiniteError:
            # The loss refuses such rows.
            return torch.zeros_like(own)
        return above | below | far

    def _clip_decides(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``[N]`` bool each: where the clip decides among tokens with A > 0, among those with A < 0, and where the dual
        one does."""
        low, high, dual = self.clips.values()
        none = torch.zeros_like(own)
        if low is None and high is None and dual is None:
            return none, none, none
        positive = own & (advantages > 0)
        negative = own & (advantages < 0)
        ratio = self.clip_ratios(rows, logprobs, behaviour, own)
        return (
            positive & (ratio > 1 + high) if high is not None else none,
            negative & (ratio < 1 - low) if low is not None else none,
            negative & (ratio > dual) if dual is not None else none,
        )

    def _clip_sums(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> Sums:
        above, below, far = self._clip_decides(rows, logprobs, behaviour, advantages, own)
        return {
            "clipped_positive": above.sum(),
            "clipped_negative": below.sum(),
            "clipped_dual": far.sum(),
            "positive": (own & (advantages > 0)).sum(),
            "negative": (own & (advantages < 0)).sum(),
        }

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        metrics = {
            "clip_fraction_positive": sums["clipped_positive"] / max(sums["positive"], 1.0),
            "clip_fraction_negative": sums["clipped_negative"] / max(sums["negative"], 1.0),
            "clip_fraction_dual": sums["clipped_dual"] / max(sums["negative"], 1.0),
        }
        if "expert_weighted" in sums:
            metrics["expert_weight"] = sums["expert_weight"] / max(sums["expert_weighted"], 1.0)
        if "corrected" in sums:
            tokens = max(scalars["own_tokens"], 1.0)
            metrics["correction_weight"] = sums["correction_weight"] / tokens
            metrics["corrected"] = sums["corrected"] / tokens
        return {**metrics, **{k: v for k, v in sums.items() if k.startswith("loss_")}}


def _scaled(advantages: Tensor, factor: float) -> Tensor:
    return advantages if factor == 1.0 else factor * advantages


@register("grpo")
@register("dr_grpo")
@register("dapo")
@register("rloo")
@register("max_rl")
@register("reinforce_pp")
@register("reinforce_pp_baseline")
class Grpo(PolicyGradient):
    """The clipped surrogate on own tokens; expert rows only shift the baseline."""


@register("reinforce")
@register("reinforce_baseline")
class Reinforce(PolicyGradient):
    """``−A log π_θ``: without a ratio, so the samples must be the current policy's."""

    def own_losses(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> Tensor:
        return -advantages * logprobs


@register("gspo")
class Gspo(PolicyGradient):
    """The clip on the geometric mean of a row's own ratios, the same for all its tokens."""

    def clip_ratios(self, rows: Rows, logprobs: Tensor, behaviour: Tensor, own: Tensor) -> Tensor:
        mean = sequence_log_ratio(logprobs, behaviour, rows.row, rows.count, own)
        return rows.by_token(mean).exp()


@register("gspo_token")
class GspoToken(PolicyGradient):
    """``s = sg(s_i) π_θ / sg(π_θ)``: GSPO's value and clip, each token's own gradient."""

    def clip_ratios(self, rows: Rows, logprobs: Tensor, behaviour: Tensor, own: Tensor) -> Tensor:
        mean = sequence_log_ratio(logprobs.detach(), behaviour, rows.row, rows.count, own)
        # The brackets: the difference is exactly 0, and only its gradient remains.
        return (rows.by_token(mean) + (logprobs - logprobs.detach())).exp()


@register("cispo")
class Cispo(PolicyGradient):
    """``−sg(clamp(ρ)) A log π_θ``: the clip bounds the weight and never stops the gradient."""

    def own_losses(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> Tensor:
        return cispo(
            logprobs,
            log_ratio(logprobs, behaviour),
            advantages,
            clip_low=self.clips["clip_low"],
            clip_high=self.clips["clip_high"],
        )

    def _clip_decides(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # A weight is bounded on both sides, whatever the sign of A.
        low, high, _ = self.clips.values()
        weight = self.clip_ratios(rows, logprobs, behaviour, own)
        bounded = torch.zeros_like(own)
        if low is not None:
            bounded = bounded | (weight < 1 - low)
        if high is not None:
            bounded = bounded | (weight > 1 + high)
        bounded = own & bounded
        return bounded & (advantages > 0), bounded & (advantages < 0), torch.zeros_like(own)


@register("tis")
@register("icepop")
@register("mis")
class Corrected(PolicyGradient):
    """``−sg(w(π_θ/μ)) A log π_θ`` with w truncated, or masked if out of bounds."""

    settings: Weighed

    def __init__(self, settings: Weighed) -> None:
        super().__init__(settings)
        if settings.correction == "none":
            raise ConfigError(
                "learner.objective.correction=none leaves stale tokens without any weight: choose "
                "truncate or mask, or the objective reinforce for fresh samples"
            )

    def weights(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, own: Tensor
    ) -> tuple[Tensor, Sums]:
        """``[N]`` detached weight of each own token, and how many were out of bounds."""
        settings = self.settings
        found = correction_weights(
            logprobs - finite("rows.behaviour", behaviour),
            settings.correction,
            settings.correction_level,
            low=settings.correction_low,
            high=settings.correction_high,
            row=rows.row,
            rows=rows.count,
            among=own,
        )
        outside = found == 0 if settings.correction == "mask" else found >= settings.correction_high
        return found, {
            "correction_weight": where(own, found).sum(),
            "corrected": (own & outside).sum(),
        }

    def own_losses(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> Tensor:
        weights, _ = self.weights(rows, logprobs, behaviour, own)
        return -advantages * weights * logprobs

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        total, sums = super().loss(rows, scalars)
        own = ~rows.expert & rows.kept
        anchor = self.anchor(rows, own)
        _, correction_sums = self.weights(rows, anchor, where(own, rows.behaviour), own)
        return total, sums | correction_sums

    def anchor(self, rows: Rows, own: Tensor) -> Tensor:
        """``[N]`` detached log-probs whose ratio to μ is the weight."""
        assert rows.logprobs is not None
        return widened(where(own, rows.logprobs.detach()))


@register("decoupled_ppo")
class Decoupled(Corrected):
    """``w(π_prox/μ) · clip(π_θ/π_prox)``: the clip is around the step's first weights."""

    columns = frozenset({"behaviour", "proximal"})

    def own_losses(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> Tensor:
        weights, _ = self.weights(rows, self.anchor(rows, own), behaviour, own)
        ratios = self.clip_ratios(rows, logprobs, behaviour, own)
        return weights * clip_surrogate(ratios, advantages, **self.clips)

    def clip_ratios(self, rows: Rows, logprobs: Tensor, behaviour: Tensor, own: Tensor) -> Tensor:
        return log_ratio(logprobs, self.anchor(rows, own)).exp()

    def anchor(self, rows: Rows, own: Tensor) -> Tensor:
        if rows.proximal is None:
            raise ConfigError("decoupled_ppo needs the step's first log-probs: rows.proximal")
        return widened(finite("rows.proximal", where(own, rows.proximal.detach())))
