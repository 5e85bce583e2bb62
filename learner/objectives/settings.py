"""All numbers that an objective may depend on, whichever objective it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..losses.advantages import Baseline
from ..losses.aggregation import Aggregation
from ..losses.penalties import KlForm
from ..losses.ratios import Correction, CorrectionLevel
from ..losses.shaping import ExpertBehaviour, Shaping


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """The keys of the config's ``learner.objective`` (:class:`~tandem.common.config.ObjectiveConfig`
    tells what each means), and one of ``expert``. Defaults are those of a name that sets none."""

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
    own_shaping: Shaping = "none"
    """Of own ratios."""
    correction: Correction = "none"
    """Of weights against the behaviour policy, out of bounds."""
    correction_level: CorrectionLevel = "token"
    """What such a weight is of."""
    correction_low: float = 0.5
    """Least weight that a mask keeps."""
    correction_high: float = 2.0
    """Greatest weight."""
    max_probability: float | None = None
    """Tokens that are likelier leave the loss."""
    own_advantage_weight: float = 1.0
    """Factor of own tokens' advantages."""
    expert_advantage_weight: float = 1.0
    """Factor of expert tokens' advantages."""
    shaping: Shaping = "ratio"
    """Of expert weights."""
    gamma: float = 0.1
    """γ of the shaping."""
    shaping_exponent: float = 0.5
    """k of ``power``."""
    shaping_coefficient: float = 0.1
    """c of ``log`` and ``plus_log``."""
    expert_behaviour: ExpertBehaviour = "recorded"
    """π_φ of expert weights."""
    expert_clip_low: float | None = None
    """Least expert weight."""
    expert_clip_high: float | None = None
    """Greatest expert weight."""
    expert_negative: bool = False
    """Whether expert tokens with A < 0 stay in the loss."""
    sft_coefficient: float = 1.0
    """Of a supervised term."""
    entropy_coefficient: float = 0.0
    """Of an entropy bonus."""
    entropy_over: Literal["own", "all"] = "own"
    """Tokens of the bonus."""
    entropy_target: float | None = None
    """The coefficient grows as the entropy falls under it."""
    entropy_adapt: Literal["scaled", "stepped", "learned"] = "scaled"
    """How it does so."""
    entropy_step: float = 0.005
    """Step of ``stepped`` and ``learned``."""
    kl_coefficient: float = 0.0
    """β of a KL penalty in the loss."""
    kl_form: KlForm = "k3"
    """How that is estimated."""
    kl_reward_coefficient: float = 0.0
    """β of a KL penalty in the reward."""
    kl_target: float | None = None
    """KL per own token that both β are steered to."""
    kl_gain: float = 0.1
    """How fast."""
    value_coefficient: float = 0.5
    """Of the critic's loss."""
    value_clip: float | None = 0.2
    """Of the critic's loss."""
    beta: float = 0.1
    """β of preference losses."""
    label_smoothing: float = 0.0
    """Of DPO."""
    desirable_weight: float = 1.0
    """λ_D of KTO."""
    undesirable_weight: float = 1.0
    """λ_U of KTO."""
    replay_share: float = 0.5
    """ρ of ExGRPO."""
    mu_peak: float = 0.9
    """CHORD's μ at its greatest."""
    mu_valley: float = 0.05
    """CHORD's μ in the end."""
    mu_warmup_steps: int = 0
    """Steps to the peak."""
    mu_decay_steps: int = 200
    """Steps from the peak to the valley."""
    exploration_power: float = 0.5
    """γ of RL-PLUS's advantage."""
    entropy_share: float = 0.2
    """Share of prefix tokens that Prefix-RFT learns from."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """For an objective of your own."""
