"""``learner.objective``: the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..objectives import OBJECTIVES, least_verdicts, with_defaults
from .section import NonNegative, Section, Share

Shaping = Literal["none", "ratio", "log", "power", "square_root", "plus_log"]
"""Of an importance weight w: w, w/(w + γ), c·log w, w^k, √w, w + c·log w."""


class ObjectiveConfig(Section):
    """The loss. What each name reads and sets: ``docs/objectives.md``."""

    name: str = "grpo"
    """A built-in objective, or a function's or class's import path (package.module:function). Keys
    that a config doesn't set have the name's own defaults."""
    advantage: Literal[
        "group_mean",
        "group_mean_std",
        "own_mean",
        "own_mean_std",
        "leave_one_out",
        "max_rl",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "none",
    ] = "group_mean"
    """Baseline: whole group, whole group over std, own rows only, own rows over std, the group's other
    rows, over the group's mean, whitened over the batch (before or after the group's mean is taken
    off), or the raw reward."""
    aggregation: Literal["constant", "width", "token_mean", "sequence_mean", "by_source"] = (
        "constant"
    )
    """Denominator, always global over the update: longest response × rows, longest response, all
    tokens, each row's tokens and then rows, own and expert tokens apart."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = 0.2
    """PPO clip below; None = no clip."""
    clip_high: Annotated[float, Field(gt=0)] | None = 0.2
    """PPO clip above; None = no clip."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bounds the loss of tokens with A < 0 (arXiv 1912.09729); None = no bound."""
    own_shaping: Shaping = "none"
    """Of own ratios, before the clip; ``ratio`` is [p/(p+γ)] / [p_μ/(p_μ+γ)]."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """What happens to weights against the behaviour policy that are out of bounds."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Such a weight is a token's, the product over a row, or the row's geometric mean."""
    correction_low: Annotated[float, Field(ge=0)] = 0.5
    """Least weight that ``mask`` keeps."""
    correction_high: Annotated[float, Field(gt=0)] = 2.0
    """Greatest weight."""
    max_probability: Annotated[float, Field(gt=0, le=1)] | None = None
    """Tokens that are likelier leave the loss; None = none do."""
    own_advantage_weight: float = 1.0
    """Factor of the advantages of own tokens (LUFFY's prefix_reward_weight_beta)."""
    expert_advantage_weight: float = 1.0
    """Factor of the advantages of expert tokens (LUFFY's prefix_reward_weight_alpha)."""
    shaping: Shaping = "ratio"
    """Of the expert weight w: ``ratio`` is f(w) = w / (w + γ) (LUFFY, arXiv 2504.14945)."""
    gamma: Annotated[float, Field(gt=0)] = 0.1
    """γ of the shaping."""
    shaping_exponent: Annotated[float, Field(gt=0)] = 0.5
    """k of ``power``."""
    shaping_coefficient: float = 0.1
    """c of ``log`` and ``plus_log``."""
    expert_behaviour: Literal["recorded", "one", "published"] = "recorded"
    """Denominator of w: π_φ where it is known and 1 where not; always 1; or as LUFFY's code has it,
    π_θ/(π_φ + 1e-6) unshaped where it is known."""
    expert_clip_low: float | None = None
    """Least shaped weight; None = no bound."""
    expert_clip_high: float | None = None
    """Greatest shaped weight; None = no bound."""
    sft_coefficient: float = 1.0
    """Of the supervised term where the objective has one."""
    entropy_coefficient: float = 0.0
    """Entropy bonus, full vocabulary."""
    entropy_over: Literal["own", "all"] = "own"
    """Tokens of the entropy bonus."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Entropy, nats a token, that the coefficient holds up; None = it is fixed."""
    entropy_adapt: Literal["scaled", "stepped", "learned"] = "scaled"
    """How: ``scaled``: times target over measured entropy. ``stepped``: after each update up by
    ``entropy_step`` under the target, down above it, within [0, 1] (Skywork-OR1). ``learned``: as a
    parameter α, by gradient descent on α (H − H*) (SAC)."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """Step of ``stepped``, learning rate of ``learned``."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """β of a KL penalty to a reference in the loss; own tokens."""
    kl_form: Literal["k2", "k3", "kl", "abs", "mse", "low_var"] = "k3"
    """Its estimator: k2 and k3 with the ratio π_θ/μ, or one of LUFFY's without it."""
    kl_reward_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """β of a KL penalty in the reward: a row's advantage is of R − β Σ log μ/π_ref over its own
    tokens."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL to the reference, nats an own token, that both β are steered to (arXiv 1909.08593); None =
    they are fixed."""
    kl_gain: Annotated[float, Field(gt=0, le=1)] = 0.1
    """How fast: after each update β is multiplied by 1 + gain · clamp(KL/target − 1, ±0.2)."""
    value_coefficient: float = 0.5
    """Of a critic's loss."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """How far from its old value a critic's new one counts; None = any."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """β of preference losses."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Of dpo: share of pairs whose labels are taken to be wrong."""
    desirable_weight: float = 1.0
    """λ_D of kto."""
    undesirable_weight: float = 1.0
    """λ_U of kto."""
    replay_share: Share = 0.5
    """ρ of exgrpo: weight of the groups with a replayed row."""
    mu_peak: Share = 0.9
    """μ of chord at its greatest."""
    mu_valley: Share = 0.05
    """μ of chord in the end."""
    mu_warmup_steps: NonNegative = 0
    """Steps to the peak."""
    mu_decay_steps: NonNegative = 200
    """Steps from the peak to the valley."""
    exploration_power: Annotated[float, Field(ge=0)] = 0.5
    """γ of rl_plus: A (1 − π_θ)^γ."""
    entropy_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a prefix's tokens, those of greatest entropy, that prefix_rft learns from."""
    truncation: Literal["wrong", "mask", "zero_advantage"] = "wrong"
    """Rows cut by length: ``wrong``: as they were graded. ``mask``: in the baseline and out of the
    loss. ``zero_advantage``: the same through an advantage of 0."""
    stragglers: Literal["wrong", "mask", "zero_advantage", "leave_out"] = "mask"
    """Rows cut at ``replay.group_deadline_seconds``, likewise: a slow host isn't the text's own
    doing. ``leave_out``: out of the baseline too, which favours short answers."""
    params: Mapping[str, Any] = Field(default_factory=dict)
    """For an objective of your own, as they are."""

    @model_validator(mode="before")
    @classmethod
    def _named_defaults(cls, given: Any) -> Any:
        return with_defaults(given) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _adaptive(self) -> ObjectiveConfig:
        if self.entropy_adapt != "scaled" and self.entropy_target is None:
            raise ValueError(
                f"entropy_adapt={self.entropy_adapt} needs something to follow: set entropy_target"
            )
        if self.entropy_adapt == "learned" and not self.entropy_coefficient:
            raise ValueError(
                "entropy_adapt=learned multiplies the coefficient: set entropy_coefficient, where "
                "it begins"
            )
        if self.kl_target is not None and not (self.kl_coefficient or self.kl_reward_coefficient):
            raise ValueError(
                "kl_target has no β to steer: set kl_coefficient or kl_reward_coefficient"
            )
        entry = OBJECTIVES.get(self.name)
        if self.kl_reward_coefficient and entry and "kl_reward_coefficient" not in entry.reads:
            raise ValueError(
                f"{self.name} learns from no advantage that kl_reward_coefficient could change: "
                f"leave it at 0"
            )
        return self

    @property
    def columns(self) -> frozenset[str]:
        """Log-probs that the trainer fills in; of an objective of your own those that its keys ask
        for."""
        entry = OBJECTIVES.get(self.name)
        if entry is None:
            return frozenset({"behaviour"})
        found = set(entry.columns)
        if self.kl_coefficient and "kl_coefficient" in entry.reads:
            found.add("reference")
        scaled = self.entropy_target is not None and self.entropy_adapt == "scaled"
        if self.entropy_coefficient and scaled and "entropy_target" in entry.reads:
            found.add("current")
        if self.max_probability is not None and self.name == "luffy_code":
            found.add("current")
        return frozenset(found)

    @property
    def needs_reference(self) -> bool:
        """Whether every rank holds a reference model beside the trained one."""
        return "reference" in self.columns or self.kl_reward_coefficient > 0

    @property
    def least_verdicts(self) -> int:
        """Own samples with a verdict without which a group teaches nothing."""
        return least_verdicts(self.name, self.advantage)

    @property
    def fresh_only(self) -> bool:
        """Whether nothing in it holds stale own tokens."""
        entry = OBJECTIVES.get(self.name)
        # Some have a ratio that may be clipped, others none, whatever the clip's keys say.
        return entry is not None and entry.fresh and not (entry.has_ratio and self.clip_high)
