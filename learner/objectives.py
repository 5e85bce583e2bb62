"""The objectives: statistics of a batch plus an additive loss over its rows.

An :class:`Objective` is a pure function of tensors in two parts. ``statistics`` sums up what the
denominators need, over all rows of an update, without gradient. ``loss`` gives the part of the
loss that some of the rows make, so that the parts of any split add up to the same loss and
gradient. A split never goes through a ``unit``.

A new one is a class with a ``@register("name")``; a user's own is named in the config by its
import path, ``package.module:Class`` or ``package.module.Class``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..common.errors import ConfigError
from .advantages import Baseline
from .aggregation import Aggregation, aggregate, counts
from .objective_names import OBJECTIVES, check_name
from .ratios import log_ratio, ppo_clip, shaped
from .rows import Rows

Column = Literal["behaviour", "proximal", "reference", "values", "current"]
"""What the trainer fills in besides the rows themselves; ``current`` means that ``statistics``
wants ``rows.logprobs`` (one pass without gradient)."""
Unit = Literal["row", "pair", "group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """All numbers that an objective may depend on; see the config's ``learner.objective``."""

    advantage: Baseline = "group_mean"
    """Baseline of the advantages."""
    aggregation: Aggregation = "constant"
    """Denominator."""
    clip_low: float | None = 0.2
    """PPO clip below."""
    clip_high: float | None = 0.2
    """PPO clip above."""
    dual_clip: float | None = 3.0
    """Bound for A < 0."""
    shaping: Literal["none", "ratio"] = "ratio"
    """Of expert weights."""
    gamma: float = 0.1
    """γ of the shaping."""
    sft_coefficient: float = 1.0
    """Of a supervised term."""
    entropy_coefficient: float = 0.0
    """Of an entropy bonus over own tokens."""
    expert_negative: bool = False
    """Whether expert tokens with A < 0 stay in the loss."""


class Objective(ABC):
    """One training objective; see the module."""

    unit: ClassVar[Unit] = "row"
    """What no micro-batch, mini-batch or rank splits."""
    columns: ClassVar[frozenset[Column]] = frozenset({"behaviour"})
    """What the trainer has to fill in."""
    plain_temperature: ClassVar[frozenset[Literal["own", "expert"]]] = frozenset()
    """Sources whose tokens are scored at temperature 1 rather than at the sample's (SFT,
    preference losses)."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        self.settings = settings

    @property
    def needs_entropy(self) -> bool:
        """Whether ``rows.entropy`` must carry a gradient."""
        return self.settings.entropy_coefficient != 0

    def active(self, rows: Rows) -> Tensor:
        """``[R]`` bool: rows that can move the gradient. The others need no forward pass.

        They still count in ``statistics``.
        """
        return torch.ones(rows.count, dtype=torch.bool, device=rows.advantages.device)

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        """Scalars that are summed over all rows of the update, then handed to every loss.

        Additive over units; float64; no gradient.
        """
        return counts(rows.row, rows.expert, rows.count)

    @abstractmethod
    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of the update's loss that these rows make, and sums for the metrics.

        Args:
            rows: Whole units, with ``logprobs`` filled in.
            scalars: The sums of :meth:`statistics` over the update, and ``constant``: configured
                response length × nominal rows of the update.

        Returns:
            A scalar with gradient, additive over units, and detached sums, additive too.
        """

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        """Metrics of an update from the sums of its losses."""
        return dict(sums)


REGISTRY: dict[str, type[Objective]] = {}


def register(name: str) -> Callable[[type[Objective]], type[Objective]]:
    """Class decorator: the objective's name in the config."""

    def add(cls: type[Objective]) -> type[Objective]:
        if name not in OBJECTIVES:
            raise ValueError(f"{name} isn't among the names in learner/objective_names.py")
        if REGISTRY.setdefault(name, cls) is not cls:
            raise ValueError(f"{name} is already the name of another objective")
        return cls

    return add


def make(name: str, settings: ObjectiveSettings) -> Objective:
    """The objective of that name, or at that import path.

    Raises:
        ConfigError: there is none.
    """
    cls = REGISTRY.get(name)
    if cls is None:
        cls = _imported(name)
    return cls(settings)


def _imported(path: str) -> type[Objective]:
    check_name(path)
    module, colon, attribute = path.partition(":")
    if not colon:
        module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"learner.objective.name={path!r} can't be imported: {error} (built in: "
            f"{', '.join(OBJECTIVES)})"
        ) from None
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ConfigError(f"learner.objective.name={path!r} is not a subclass of Objective")
    return found


def _where(mask: Tensor, values: Tensor) -> Tensor:
    """Values where the mask is on, else 0, with no gradient and no NaN from the others."""
    return torch.where(mask, values, torch.zeros_like(values))


class PolicyGradient(Objective):
    """Own tokens with a PPO clip on their behaviour log-probs, and an entropy bonus.

    ``L = agg(clip(ρ, A)) − c_H mean_own(H)`` with ρ = π_θ/μ at the sample's temperature. Expert
    tokens are left to :meth:`expert_losses` of a subclass. Advantages, masks and denominators:
    :mod:`tandem.learner.advantages`, :mod:`tandem.learner.aggregation`.
    """

    def active(self, rows: Rows) -> Tensor:
        if self.needs_entropy:
            return torch.ones_like(rows.masked)
        return (rows.advantages != 0) & ~rows.masked

    def expert_losses(self, rows: Rows, logprobs: Tensor, advantages: Tensor) -> Tensor | None:
        """``[N]`` loss of each expert token (anything at the others); None = none."""
        return None

    def expert_mask(self, rows: Rows, advantages: Tensor) -> Tensor:
        """``[N]`` bool: expert tokens in the loss.

        Those with A < 0 would push the expert's own text down; they leave unless told otherwise.
        """
        kept = rows.expert & ~rows.by_token(rows.masked)
        return kept if self.settings.expert_negative else kept & (advantages >= 0)

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.logprobs is not None
        settings = self.settings
        per_token = rows.by_token(rows.advantages.to(rows.logprobs.dtype))
        own = ~rows.expert & ~rows.by_token(rows.masked)
        logprobs = _where(own, rows.logprobs)
        ratios = log_ratio(logprobs, _where(own, rows.behaviour))
        losses = ppo_clip(
            ratios,
            per_token,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )
        own_losses = _where(own, losses)
        sums = self._clip_sums(ratios.detach(), per_token, own)
        total = self._aggregate(rows, own_losses, scalars)
        sums["loss_own"] = total.detach()
        expert = self.expert_mask(rows, per_token)
        expert_losses = self.expert_losses(rows, _where(expert, rows.logprobs), per_token)
        if expert_losses is not None:
            part = self._aggregate(rows, _where(expert, expert_losses), scalars)
            sums["loss_expert"] = part.detach()
            total = total + part
        if self.needs_entropy:
            assert rows.entropy is not None
            entropy = _where(own, rows.entropy).sum() / max(scalars["own_tokens"], 1.0)
            total = total - settings.entropy_coefficient * entropy
        return total, sums

    def _aggregate(self, rows: Rows, losses: Tensor, scalars: Mapping[str, float]) -> Tensor:
        return aggregate(
            losses,
            row=rows.row,
            expert=rows.expert,
            lengths=rows.lengths,
            how=self.settings.aggregation,
            scalars=scalars,
        )

    def _clip_sums(self, ratios: Tensor, advantages: Tensor, own: Tensor) -> dict[str, Tensor]:
        positive = own & (advantages > 0)
        negative = own & (advantages < 0)
        ratio = ratios.exp()
        high, low = self.settings.clip_high, self.settings.clip_low
        dual = self.settings.dual_clip
        none = torch.zeros_like(own)
        above = positive & (ratio > 1 + high) if high is not None else none
        below = negative & (ratio < 1 - low) if low is not None else none
        far = negative & (ratio > dual) if dual is not None else none
        return {
            "clipped_positive": above.sum(),
            "clipped_negative": below.sum(),
            "clipped_dual": far.sum(),
            "positive": positive.sum(),
            "negative": negative.sum(),
        }

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        shares = {
            "clip_fraction_positive": sums["clipped_positive"] / max(sums["positive"], 1.0),
            "clip_fraction_negative": sums["clipped_negative"] / max(sums["negative"], 1.0),
            "clip_fraction_dual": sums["clipped_dual"] / max(sums["negative"], 1.0),
        }
        return {**shares, **{k: v for k, v in sums.items() if k.startswith("loss_")}}


@register("grpo")
class Grpo(PolicyGradient):
    """GRPO (arXiv 2402.03300) on own tokens; expert rows only shift the baseline.

    ``L = agg_own( max(−A ρ, −A clamp(ρ, 1−ε, 1+ε)) )``, dual clip for A < 0. Zero-variance
    groups have A = 0. No KL term.
    """


@register("luffy")
class Luffy(PolicyGradient):
    """Mixed-policy GRPO (LUFFY, arXiv 2504.14945, eq. 6-8).

    Own tokens as in GRPO; expert tokens ``−A f(w)``, w = π_θ/π_φ with π_φ = 1 where the
    expert's log-prob isn't known, f(w) = w/(w + γ) (``shaping=ratio``) or w (``none``), never
    clipped. The advantage is over the whole group. ``clip_low = clip_high = dual_clip = None``
    is the loss as published.
    """

    def expert_losses(self, rows: Rows, logprobs: Tensor, advantages: Tensor) -> Tensor | None:
        weights = log_ratio(logprobs, _where(rows.expert, rows.behaviour))
        if self.settings.shaping == "ratio":
            return -advantages * shaped(weights, self.settings.gamma)
        return -advantages * weights.exp()


@register("rl_sft_loss")
class RlSftLoss(PolicyGradient):
    """GRPO on own tokens plus a supervised loss on expert tokens ("RL w/ SFT loss" of LUFFY).

    ``L = L_GRPO(own) + c · (−Σ log π_θ / expert tokens)``. The supervised term is a mean over
    the update's expert tokens whatever ``aggregation`` is, as in the published code, and is
    scored at temperature 1.
    """

    plain_temperature = frozenset({"expert"})

    def active(self, rows: Rows) -> Tensor:
        return super().active(rows) | (rows.expert_row & ~rows.masked)

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        total, sums = super().loss(rows, scalars)
        assert rows.logprobs is not None
        kept = rows.expert & ~rows.by_token(rows.masked)
        part = -_where(kept, rows.logprobs).sum() / max(scalars["expert_tokens"], 1.0)
        part = self.settings.sft_coefficient * part
        sums["loss_expert"] = part.detach()
        return total + part, sums


@register("sft")
class Sft(Objective):
    """Cross entropy of the expert tokens; own rows are left out.

    ``L = agg_expert(−log π_θ)`` at temperature 1. ``token_mean`` and ``by_source`` divide by the
    expert tokens of the update.
    """

    columns = frozenset()
    plain_temperature = frozenset({"own", "expert"})

    def active(self, rows: Rows) -> Tensor:
        return rows.expert_row & ~rows.masked

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        found = counts(rows.row, rows.expert, rows.count)
        # Own rows are no data of this objective, so they count in no denominator.
        found["own_tokens"] = torch.zeros_like(found["own_tokens"])
        found["sequences"] = rows.expert_row.sum().to(torch.float64)
        return found

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.logprobs is not None
        kept = rows.expert & ~rows.by_token(rows.masked)
        losses = -_where(kept, rows.logprobs)
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
