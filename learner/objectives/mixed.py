"""Own attempts and expert traces in one loss: LUFFY and its successors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ...common.errors import ConfigError
from ...common.objectives import experts
from ...common.objectives.keys import Expert
from ..losses.aggregation import aggregate, counts
from ..losses.finite import finite, widened
from ..losses.ratios import MAX_LOG_RATIO, clamped, log_ratio, ppo_clip
from ..losses.shaping import chord_mu, chord_phi, expert_weights
from ..rows.rows import Rows
from .base import Sums, Unit, register, scored, where
from .policy import PolicyGradient
from .supervised import RlSftLoss


@register("luffy")
@register("luffy_paper")
class Luffy(PolicyGradient):
    """Own tokens as in GRPO; expert tokens ``−A f(w)``, never PPO-clipped."""

    settings: Expert

    def expert_losses(
        self, rows: Rows, logprobs: Tensor, advantages: Tensor, expert: Tensor
    ) -> tuple[Tensor, Tensor | None] | None:
        settings = self.settings
        weights = expert_weights(
            logprobs,
            where(expert, rows.behaviour),
            rows.known & expert,
            settings.shaping,
            behaviour=settings.expert_behaviour,
            gamma=settings.gamma,
            exponent=settings.shaping_exponent,
            coefficient=settings.shaping_coefficient,
            clip_low=settings.expert_clip_low,
            clip_high=settings.expert_clip_high,
        )
        return -advantages * weights, weights


@register("luffy_code")
class LuffyCode(Luffy):
    """LUFFY as published in code: tokens over ``max_probability`` leave the loss's denominator too, and stay in
    those of entropy and KL."""

    def __init__(self, settings: Expert) -> None:
        super().__init__(settings)
        if settings.max_probability is not None:
            self.columns = self.columns | {"current"}

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        sums = super().statistics(rows)
        most = self.settings.max_probability
        if most is None or rows.logprobs is None:
            return sums
        kept = rows.logprobs.detach().exp() <= most
        sums["own_unlikely"] = (kept & ~rows.expert).sum().double()
        sums["expert_unlikely"] = (kept & rows.expert).sum().double()
        return sums

    def divisors(self, scalars: Mapping[str, float]) -> Mapping[str, float]:
        if "own_unlikely" not in scalars:
            return scalars
        own, expert = scalars["own_unlikely"], scalars["expert_unlikely"]
        return {**scalars, "own_tokens": own, "expert_tokens": expert}


@register("exgrpo")
class ExGrpo(Luffy):
    """``(1 − ρ) J(fresh groups) + ρ J(groups with a replayed success)``.

    A group counts as replayed if one of its rows is an expert's: these rows are its own past successes,
    with their recorded log-probs. If there is only one kind of group, it has the whole weight.
    """

    settings: experts.ExGrpo
    unit: ClassVar[Unit] = "group"

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        sums = super().statistics(rows)
        replayed = self._replayed(rows)
        for name, kind in (("fresh", ~replayed), ("replayed", replayed)):
            tokens = rows.by_token(kind)
            part = counts(rows.row[tokens], rows.expert[tokens], rows.count)
            sums |= {f"{name}_{key}": value for key, value in part.items()}
            sums[f"{name}_groups"] = torch.unique(rows.group[kind]).numel() * torch.ones(
                (), dtype=torch.float64
            )
        return sums

    def _replayed(self, rows: Rows) -> Tensor:
        """``[R]`` bool: rows of groups with an expert row."""
        if not rows.count:
            return rows.expert_row
        size = int(rows.group.max()) + 1
        seen = torch.zeros(size, dtype=torch.int64, device=rows.group.device)
        return seen.index_add(0, rows.group, rows.expert_row.to(torch.int64))[rows.group] > 0

    def aggregate(self, rows: Rows, losses: Tensor, scalars: Mapping[str, float]) -> Tensor:
        kinds = {"fresh": scalars["fresh_groups"], "replayed": scalars["replayed_groups"]}
        groups = max(sum(kinds.values()), 1.0)
        share = {"fresh": 1 - self.settings.replay_share, "replayed": self.settings.replay_share}
        replayed = rows.by_token(self._replayed(rows))
        total = losses.sum() * 0.0
        for name, kind in (("fresh", ~replayed), ("replayed", replayed)):
            if not kinds[name]:
                continue
            own = {
                key: scalars[f"{name}_{key}"]
                for key in ("own_tokens", "expert_tokens", "sequences")
            }
            own["constant"] = scalars["constant"] * kinds[name] / groups
            own["width"] = scalars.get("width", 1.0)
            part = aggregate(
                where(kind, losses),
                row=rows.row,
                expert=rows.expert,
                lengths=rows.lengths,
                how=self.settings.aggregation,
                scalars=own,
            )
            total = total + (share[name] if all(kinds.values()) else 1.0) * part
        return total


@register("chord")
class Chord(RlSftLoss):
    """``(1 − μ) L_GRPO(own) + μ mean_expert(−sg(φ) log π_θ)``, μ by the step, φ = p (1 − p)."""

    settings: experts.Chord

    def coefficients(self, scalars: Mapping[str, float]) -> tuple[float, float]:
        settings = self.settings
        mu = chord_mu(
            scalars.get("step", 1.0) - 1,
            peak=settings.mu_peak,
            valley=settings.mu_valley,
            warmup_steps=settings.mu_warmup_steps,
            decay_steps=settings.mu_decay_steps,
        )
        return 1.0 - mu, mu

    def supervised(self, logprobs: Tensor) -> Tensor:
        return -chord_phi(logprobs) * logprobs


@register("rl_plus")
class RlPlus(PolicyGradient):
    """Own tokens ``−A ρ``; expert tokens ``−A (1 − sg π_θ)^γ · 2 π_θ/(π̂_ω + π_prox)``.

    π̂_ω = ½ (π_prox + 1): the unknown expert as a mixture of the step's first policy and one that is
    always certain, as in the published code.
    """

    settings: experts.RlPlus
    columns = frozenset({"behaviour", "proximal"})

    def expert_losses(
        self, rows: Rows, logprobs: Tensor, advantages: Tensor, expert: Tensor
    ) -> tuple[Tensor, Tensor | None] | None:
        if rows.proximal is None:
            raise ConfigError("rl_plus needs the step's first log-probs: rows.proximal")
        first = finite("rows.proximal", where(expert, rows.proximal.detach()))
        old = clamped(widened(first)).exp()
        # 2 π_θ / (½ (π_prox + 1) + π_prox)
        weights = 2 * clamped(logprobs).exp() / (0.5 * (old + 1) + old)
        probs = logprobs.detach().exp().clamp(max=1.0)
        explored = advantages * (1 - probs) ** self.settings.exploration_power
        return -explored * weights, weights


@register("srft")
class Srft(Luffy):
    """Cross entropy and LUFFY's term on expert tokens, signed log-probs on own ones, each weighted
    by an entropy: ``½ sg(e^−H_expert) L_SFT + agg(−A w) − 0.1 sg(e^H_own) mean⁺(log π) + mean⁻(log π)``.
    """

    columns = frozenset({"behaviour", "current"})
    SFT_WEIGHT = 0.5
    POSITIVE_WEIGHT = 0.1

    def active(self, rows: Rows) -> Tensor:
        return super().active(rows) & ~rows.masked | rows.teaching

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        sums = super().statistics(rows)
        if rows.entropy is not None:
            entropy = rows.entropy.detach()
            sums["entropy_own"] = where(~rows.expert, entropy).sum().double()
            sums["entropy_expert"] = where(rows.expert, entropy).sum().double()
        return sums

    def own_losses(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> Tensor:
        return torch.zeros_like(logprobs)

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        total, sums = super().loss(rows, scalars)
        own_tokens = max(scalars["own_tokens"], 1.0)
        expert_tokens = max(scalars["expert_tokens"], 1.0)
        kept = rows.kept & rows.by_token(rows.teaching)
        counted = self._likely_left_out(rows, kept)
        logprobs = widened(scored(rows, kept))
        positive = rows.by_token(rows.rewards > 0)
        raised = _bounded_exp(scalars["entropy_own"] / own_tokens)
        lowered = _bounded_exp(-scalars["entropy_expert"] / expert_tokens)
        pressed = logprobs.new_tensor(-self.POSITIVE_WEIGHT * raised)
        weight = torch.where(positive, pressed, torch.ones_like(pressed))
        own = where(counted & ~rows.expert, weight * logprobs).sum() / own_tokens
        sft = where(counted & rows.expert, -logprobs).sum() / expert_tokens
        sft = self.SFT_WEIGHT * lowered * sft
        sums["loss_own"] = own.detach()
        sums["loss_expert"] = sums["loss_expert"] + sft.detach()
        return total + own + sft, sums


def _bounded_exp(value: float) -> float:
    return math.exp(min(max(value, -MAX_LOG_RATIO), MAX_LOG_RATIO))


@register("prefix_rft")
class PrefixRft(PolicyGradient):
    """A demonstration's prefix with the model's own continuation: the clip on all own tokens and on
    the prefix tokens of greatest entropy, there around the step's first weights."""

    settings: experts.PrefixRft
    columns = frozenset({"behaviour", "proximal"})

    def expert_mask(self, rows: Rows, advantages: Tensor) -> Tensor:
        kept = super().expert_mask(rows, advantages)
        if rows.entropy is None:
            raise ConfigError("prefix_rft needs rows.entropy to choose its tokens by")
        return kept & most_uncertain(
            rows.entropy.detach(), rows.expert, rows.row, rows.count, self.settings.entropy_share
        )

    def expert_losses(
        self, rows: Rows, logprobs: Tensor, advantages: Tensor, expert: Tensor
    ) -> tuple[Tensor, Tensor | None] | None:
        if rows.proximal is None:
            raise ConfigError("prefix_rft needs the step's first log-probs: rows.proximal")
        first = finite("rows.proximal", where(expert, rows.proximal.detach()))
        ratios = log_ratio(logprobs, first)
        return ppo_clip(ratios, advantages, **self.clips), ratios.exp()


def most_uncertain(entropy: Tensor, among: Tensor, row: Tensor, rows: int, share: float) -> Tensor:
    """``[N]`` bool: in each row, the ``⌈share · n⌉`` with the greatest entropy among its n marked tokens;
    of equal ones, the first."""
    order = torch.argsort(torch.where(among, -entropy, torch.inf), stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    sizes = torch.bincount(row, minlength=rows)
    rank = torch.empty_like(row)
    places = torch.arange(len(row), device=row.device)
    rank[order] = places - (sizes.cumsum(0) - sizes)[row[order]]
    wanted = torch.ceil(
        share
        * torch.zeros(rows, dtype=torch.float64, device=row.device).index_add(
            0, row, among.double()
        )
    )
    return among & (rank < wanted[row])
