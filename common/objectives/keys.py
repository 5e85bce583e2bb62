"""The keys of ``learner.objective``, each written once, in the groups in which objectives read them.

Only the standard library is imported, because the learner's mathematics also reads its numbers from
these classes and should need only torch. The config validates them with pydantic, for which each type
carries its :class:`Bounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args


class Bounds:
    """Bounds of a number: ``gt``, ``ge``, ``lt``, ``le``."""

    def __init__(self, **bounds: float) -> None:
        self.bounds = bounds

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Passes the bounds on to pydantic."""
        return {**handler(source), **self.bounds}


AboveZero = Annotated[float, Bounds(gt=0)]
AboveOne = Annotated[float, Bounds(gt=1)]
BelowOne = Annotated[float, Bounds(gt=0, lt=1)]
BelowHalf = Annotated[float, Bounds(ge=0, lt=0.5)]
NonNegative = Annotated[float, Bounds(ge=0)]
Share = Annotated[float, Bounds(ge=0, le=1)]
PositiveShare = Annotated[float, Bounds(gt=0, le=1)]
Steps = Annotated[int, Bounds(ge=0)]

Cut = Literal["wrong", "mask", "zero_advantage"]
CutLate = Literal["wrong", "mask", "zero_advantage", "leave_out"]
Baseline = Literal[
    "group_mean",
    "group_mean_std",
    "own_mean",
    "own_mean_std",
    "leave_one_out",
    "max_rl",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "none",
]
Aggregation = Literal["constant", "width", "token_mean", "sequence_mean", "by_source"]
Shaping = Literal["none", "ratio", "log", "power", "square_root", "plus_log"]
"""Shapings of an importance weight w: w, w/(w + γ), c·log w, w^k, √w, w + c·log w."""
ExpertBehaviour = Literal["recorded", "one", "published"]
"""The denominator π_φ of an expert token's weight."""
Correction = Literal["none", "truncate", "mask"]
"""What is done with a weight that is out of bounds."""
CorrectionLevel = Literal["token", "sequence", "geometric"]
"""The unit that has a weight: a token, a row (the product), or a row (the geometric mean)."""
KlForm = Literal["k2", "k3", "kl", "abs", "mse", "low_var"]
KlRewardForm = Literal["k1", "k3"]

EQUAL_REWARDS = 1e-6
"""Rewards of a group within this range count as equal.

Deciding by the standard deviation fails: that of seven rewards of 0.3 is 3e-8 in float32, and
dividing by it makes advantages of 0.03.
"""
WITHOUT_GROUP = ("reinforce_pp", "none")
"""Advantages that don't compare a row with others of its group."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss: what every objective reads, and what the rest of Tandem asks of one."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    name: str = ""
    """A built-in objective, or a function's or class's import path (package.module:function). A name
    has the keys that it reads, with defaults of its own."""
    truncation: Cut = "wrong"
    """What happens to rows cut by length: ``wrong``: they count as graded. ``mask``: they are in the
    baseline and out of the loss. ``zero_advantage``: the same through an advantage of 0."""
    stragglers: CutLate = "mask"
    """What happens to rows cut at ``replay.group_deadline_seconds``, with the same values: a slow host
    isn't the text's own doing. ``leave_out``: out of the baseline too, which favours short answers."""

    equation: ClassVar[str] = ""
    """The equation of the loss, in plain text."""
    source: ClassVar[str] = ""
    """Paper and equation, or the code that it follows."""
    use: ClassVar[str] = ""
    """When to use it."""
    trl: ClassVar[str] = ""
    """How it relates to TRL's trainer of the same name."""
    fresh: ClassVar[bool] = False
    """Whether nothing in it bounds stale own tokens, so that it needs ``replay.max_staleness=0``."""
    needs: ClassVar[tuple[str, ...]] = ("behaviour",)
    """Log-probs that the trainer fills in, whatever the keys say."""
    unit: ClassVar[Literal["row", "group"]] = "row"
    """The unit that no micro-batch splits."""
    alone: ClassVar[Literal["nothing", "by advantage", "always"]] = "nothing"
    """What it learns from an expert's trace that is alone in its group, as in offline training:
    nothing; something if the trace's advantage isn't 0; or always something."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for values that don't go together."""

    @property
    def columns(self) -> frozenset[str]:
        """Log-probs that the trainer fills in."""
        return frozenset(self.needs)

    @property
    def rejects(self) -> bool:
        """Whether it learns from responses that the data call worse or unwanted."""
        return False

    @property
    def penalises_reward(self) -> bool:
        """Whether a KL to the reference is subtracted from the rewards."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether every rank holds a reference model beside the trained one."""
        return "reference" in self.columns or self.penalises_reward

    @property
    def baseline(self) -> Baseline:
        """Baseline of the rows' advantages."""
        return "group_mean"

    @property
    def least_verdicts(self) -> int:
        """Least number of own samples with a verdict from which a group teaches anything.

        Two if the rows of a group are compared, as pairs or with the group's mean; one if each stands for
        itself.
        """
        return 1

    @property
    def has_ratio(self) -> bool:
        """Whether own tokens that an older policy sampled are weighted or clipped by a ratio."""
        return not self.fresh

    @property
    def fresh_only(self) -> bool:
        """Whether nothing in it bounds stale own tokens."""
        return self.fresh


@dataclass(frozen=True, kw_only=True)
class Learned(ObjectiveConfig):
    """Learns from the rows' advantages."""

    advantage: Baseline = "group_mean"
    """Baseline: whole group, whole group over std, own rows only, own rows over std, the group's other
    rows, over the group's mean, whitened over the batch (before or after the group's mean is
    subtracted), or the raw reward."""

    @property
    def baseline(self) -> Baseline:
        return self.advantage

    @property
    def least_verdicts(self) -> int:
        return 1 if self.advantage in WITHOUT_GROUP else 2


@dataclass(frozen=True, kw_only=True)
class Aggregated(ObjectiveConfig):
    """Sums its tokens' losses over a denominator."""

    aggregation: Aggregation = "constant"
    """Denominator, always global over the update: longest response × rows, longest response, all
    tokens, each row's tokens and then rows, own and expert tokens apart."""


@dataclass(frozen=True, kw_only=True)
class Clip(ObjectiveConfig):
    """Clips the ratio of own tokens."""

    clip_low: BelowOne | None = 0.2
    """PPO clip below; null = no clip."""
    clip_high: AboveZero | None = 0.2
    """PPO clip above; null = no clip."""

    @property
    def has_ratio(self) -> bool:
        return True

    @property
    def fresh_only(self) -> bool:
        return self.fresh and not self.clip_high


@dataclass(frozen=True, kw_only=True)
class DualClip(Clip):
    """Also clips on the far side."""

    dual_clip: AboveOne | None = 3.0
    """Bounds the loss of tokens with A < 0 (arXiv 1912.09729); null = no bound."""


@dataclass(frozen=True, kw_only=True)
class Unclipped(DualClip):
    """Has a clip that is off by default."""

    clip_low: BelowOne | None = None
    clip_high: AboveZero | None = None
    dual_clip: AboveOne | None = None


@dataclass(frozen=True, kw_only=True)
class Entropy(ObjectiveConfig):
    """Has an entropy bonus."""

    entropy_coefficient: float = 0.0
    """Entropy bonus, full vocabulary."""
    entropy_over: Literal["own", "all"] = "own"
    """Tokens of the entropy bonus."""
    entropy_target: AboveZero | None = None
    """Entropy, in nats per token, that the coefficient maintains; null = the coefficient is fixed."""
    entropy_adapt: Literal["scaled", "stepped", "learned"] = "scaled"
    """How the coefficient adapts: ``scaled``: times target over measured entropy. ``stepped``: after each
    update up by ``entropy_step`` under the target, down above it, within [0, 1] (Skywork-OR1).
    ``learned``: as a parameter α, by gradient descent on α (H − H*) (SAC)."""
    entropy_step: AboveZero = 0.005
    """Step of ``stepped``, learning rate of ``learned``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_adapt != "scaled" and self.entropy_target is None:
            raise ValueError(
                f"entropy_adapt={self.entropy_adapt} needs something to follow: set entropy_target"
            )
        if self.entropy_adapt == "learned" and not self.entropy_coefficient:
            raise ValueError(
                "entropy_adapt=learned multiplies the coefficient: set entropy_coefficient, where "
                "it begins"
            )

    @property
    def scales_entropy(self) -> bool:
        """Whether the bonus is scaled by the entropy that is measured before each update."""
        return self.entropy_target is not None and self.entropy_adapt == "scaled"

    @property
    def columns(self) -> frozenset[str]:
        names = super().columns
        return names | {"current"} if self.entropy_coefficient and self.scales_entropy else names


@dataclass(frozen=True, kw_only=True)
class Kl(ObjectiveConfig):
    """May be kept near a reference policy."""

    kl_coefficient: NonNegative = 0.0
    """β of a KL penalty to a reference in the loss, over own tokens."""
    kl_form: KlForm = "k3"
    """Estimator of this KL: k2 and k3 with the ratio π_θ/μ, or one of LUFFY's without it."""
    kl_reward_coefficient: NonNegative = 0.0
    """β of a KL penalty in the reward: a row's advantage is computed from R − β Σ log μ/π_ref over its
    own tokens. Where graders paid equal rewards, an advantage over their std isn't divided by it."""
    kl_reward_form: KlRewardForm = "k1"
    """Estimator of the KL in the reward: k1, log μ/π_ref, or k3, π_ref/μ − 1 + log μ/π_ref, which is never negative."""
    kl_target: AboveZero | None = None
    """KL to the reference, in nats per own token, to which both β are steered (arXiv 1909.08593); null =
    they are fixed."""
    kl_gain: PositiveShare = 0.1
    """Speed of the steering: β is multiplied by 1 + gain · clamp(KL/target − 1, ±0.2), that of the loss after each
    update, and that of the reward, whose KL is measured once a step, after each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target is not None and not (self.kl_coefficient or self.kl_reward_coefficient):
            raise ValueError(
                "kl_target has no β to steer: set kl_coefficient or kl_reward_coefficient"
            )

    @property
    def penalises_reward(self) -> bool:
        return self.kl_reward_coefficient > 0

    @property
    def columns(self) -> frozenset[str]:
        return super().columns | {"reference"} if self.kl_coefficient else super().columns


@dataclass(frozen=True, kw_only=True)
class Policy(Kl, Entropy, Aggregated, Learned):
    """A policy gradient."""

    max_probability: PositiveShare | None = None
    """Tokens with a greater probability leave the loss; null = none do."""


@dataclass(frozen=True, kw_only=True)
class OwnTokens(Policy):
    """A policy gradient on own tokens."""

    own_advantage_weight: float = 1.0
    """Factor of the advantages of own tokens (LUFFY's prefix_reward_weight_beta)."""
    turn_discount: PositiveShare | None = None
    """γ of an episode's turns: the advantage of turn k is that of G_k = Σ_{l ≥ k} γ^(l − k) r_l among the group's
    episodes that have a turn k (GTPO, arXiv 2511.14846). null = all turns have their episode's advantage."""


@dataclass(frozen=True, kw_only=True)
class Weighed(OwnTokens):
    """A policy gradient that weighs stale tokens against the policy that sampled them."""

    correction: Correction = "none"
    """What happens to weights against the behaviour policy that are out of bounds."""
    correction_level: CorrectionLevel = "token"
    """Unit of such a weight: a token, a row (the product), or a row (the geometric mean)."""
    correction_low: NonNegative = 0.5
    """Least weight that ``mask`` keeps."""
    correction_high: AboveZero = 2.0
    """Greatest weight."""


@dataclass(frozen=True, kw_only=True)
class Shapes(ObjectiveConfig):
    """Shapes importance weights, of own or of expert tokens."""

    gamma: AboveZero = 0.1
    """γ of the shaping."""
    shaping_exponent: AboveZero = 0.5
    """k of ``power``."""
    shaping_coefficient: float = 0.1
    """c of ``log`` and ``plus_log``."""


@dataclass(frozen=True, kw_only=True)
class Clipped(Shapes, DualClip, OwnTokens):
    """The clipped surrogate on own tokens."""

    own_shaping: Shaping = "none"
    """Shaping of own ratios before the clip; ``ratio`` is [p/(p+γ)] / [p_μ/(p_μ+γ)]."""


@dataclass(frozen=True, kw_only=True)
class ExpertWeight(ObjectiveConfig):
    """Learns from the advantages of expert tokens."""

    expert_advantage_weight: float = 1.0
    """Factor of the advantages of expert tokens (LUFFY's prefix_reward_weight_alpha)."""


@dataclass(frozen=True, kw_only=True)
class Expert(ExpertWeight, Shapes, Policy):
    """A policy gradient that weighs expert tokens as LUFFY does."""

    shaping: Shaping = "ratio"
    """Shaping of the expert weight w: ``ratio`` is f(w) = w / (w + γ) (LUFFY, arXiv 2504.14945)."""
    expert_behaviour: ExpertBehaviour = "recorded"
    """Denominator of w: π_φ if it is known, else 1; always 1; or as in LUFFY's code,
    π_θ/(π_φ + 1e-6) unshaped if it is known."""
    expert_clip_low: float | None = None
    """Least shaped weight; null = no bound."""
    expert_clip_high: float | None = None
    """Greatest shaped weight; null = no bound."""


@dataclass(frozen=True, kw_only=True)
class SupervisedTerm(ObjectiveConfig):
    """Has a supervised term beside the other one."""

    sft_coefficient: float = 1.0
    """Coefficient of the supervised term."""


@dataclass(frozen=True, kw_only=True)
class Beta(ObjectiveConfig):
    """Compares log-probs with a reference, or with each other."""

    beta: AboveZero = 0.1
    """β of preference losses."""


def _shapings_but(*those: Shaping) -> tuple[Shaping, ...]:
    return tuple(one for one in get_args(Shaping) if one not in those)


_SWITCHES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "kl_form": {"kl_coefficient": (0,)},
    "kl_reward_form": {"kl_reward_coefficient": (0,)},
    "kl_gain": {"kl_target": (None,)},
    # A stepped coefficient may begin at 0.
    "entropy_over": {"entropy_coefficient": (0,), "entropy_adapt": ("scaled",)},
    "entropy_adapt": {"entropy_target": (None,)},
    "entropy_step": {"entropy_adapt": ("scaled",)},
    "correction_low": {"correction": ("truncate",)},
    "gamma": dict.fromkeys(("shaping", "own_shaping"), _shapings_but("ratio")),
    "shaping_exponent": dict.fromkeys(("shaping", "own_shaping"), _shapings_but("power")),
    "shaping_coefficient": dict.fromkeys(
        ("shaping", "own_shaping"), _shapings_but("log", "plus_log")
    ),
}
"""Keys with the other keys that switch them off, and with which values. A key is read if one of these has another value."""


def switched_off(settings: ObjectiveConfig) -> dict[str, str]:
    """Keys of a built-in objective that nothing reads beside its other settings, each with those that are why.

    >>> switched_off(Kl(kl_coefficient=0.1))
    {'kl_reward_form': 'kl_reward_coefficient=0.0', 'kl_gain': 'kl_target=None'}
    """
    found = {}
    for key, switches in _SWITCHES.items():
        there = {name: getattr(settings, name) for name in switches if hasattr(settings, name)}
        if hasattr(settings, key) and all(there[name] in switches[name] for name in there):
            found[key] = " and ".join(f"{name}={value}" for name, value in there.items())
    return found
