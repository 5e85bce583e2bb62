"""Policy gradients on own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .keys import (
    AboveOne,
    AboveZero,
    Aggregation,
    Baseline,
    BelowOne,
    Clip,
    Clipped,
    DualClip,
    NonNegative,
    ObjectiveConfig,
    OwnTokens,
    PositiveShare,
    Share,
)


@dataclass(frozen=True, kw_only=True)
class Grpo(Clipped):
    """GRPO: the clipped surrogate with the group's mean as baseline."""

    name: Literal["grpo"] = "grpo"

    equation = "L = agg_own( max(−A ρ, −A clamp(ρ, 1 − ε_low, 1 + ε_high)) ), at most −A c where A < 0; ρ = π_θ/μ"
    source = "arXiv 2402.03300, eq. 3; dual clip arXiv 1912.09729, eq. 5"
    use = "The default: reinforcement from verifiable rewards, samples up to some steps old."


@dataclass(frozen=True, kw_only=True)
class DrGrpo(Clipped):
    """Dr. GRPO: no division by the standard deviation or by each answer's length."""

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: Baseline = "group_mean"
    aggregation: Aggregation = "constant"

    equation = "as grpo, A = R − mean(R), agg = Σ / (longest response × rows)"
    source = "arXiv 2503.20783, section 3.2"
    use = "Where the lengths of wrong answers drift; what grpo does here by default."


@dataclass(frozen=True, kw_only=True)
class Dapo(Clipped):
    """DAPO: clip-higher and a mean over all tokens."""

    name: Literal["dapo"] = "dapo"
    advantage: Baseline = "group_mean_std"
    aggregation: Aggregation = "token_mean"
    clip_high: AboveZero | None = 0.28
    dual_clip: AboveOne | None = None

    equation = "as grpo, ε_low = 0.2, ε_high = 0.28, A = (R − mean) / std, agg = Σ / tokens"
    source = "arXiv 2503.14476, eq. 8 and 10-12 (overlong shaping is the reward component dapo_overlong; dynamic sampling is replay.dynamic_sampling)"
    use = "Long answers, where entropy falls too soon under a symmetric clip."


@dataclass(frozen=True, kw_only=True)
class Rloo(Clipped):
    """RLOO: the mean of the group's other samples as baseline."""

    name: Literal["rloo"] = "rloo"
    advantage: Baseline = "leave_one_out"

    equation = "as grpo, A_i = R_i − mean over j ≠ i of R_j = G/(G−1) (R_i − mean(R))"
    source = "arXiv 2402.14740, eq. 3 (there without a clip)"
    use = "An unbiased baseline for small groups."


@dataclass(frozen=True, kw_only=True)
class MaxRl(Clipped):
    """MaxRL: advantages over the group's mean reward, which gives hard problems more weight."""

    name: Literal["max_rl"] = "max_rl"
    advantage: Baseline = "max_rl"

    equation = "as grpo, A = (R − mean) / mean, 0 where the mean isn't over 0"
    source = "arXiv 2602.02710, algorithm 1"
    use = "Rewards of 0 and 1, many problems that are rarely solved."


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(Clipped):
    """REINFORCE++: rewards whitened over the whole batch, no groups needed."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    advantage: Baseline = "reinforce_pp"
    aggregation: Aggregation = "token_mean"

    equation = "as grpo, A = (R − mean over the batch) / std over the batch, by tokens"
    source = "arXiv 2501.03262, eq. 8"
    use = "One sample a problem, or problems whose groups are mostly equal."


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaseline(Clipped):
    """REINFORCE++ with the group's mean subtracted before the batch is whitened."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    advantage: Baseline = "reinforce_pp_baseline"
    aggregation: Aggregation = "token_mean"

    equation = "as grpo, A = whiten(R − mean of the group) over the batch, by tokens"
    source = "arXiv 2501.03262, section 3.3"
    use = "As reinforce_pp, with several samples a problem."


@dataclass(frozen=True, kw_only=True)
class Gspo(DualClip, OwnTokens):
    """GSPO: one ratio a sequence, the geometric mean of its tokens'."""

    name: Literal["gspo"] = "gspo"
    advantage: Baseline = "group_mean_std"
    aggregation: Aggregation = "sequence_mean"
    clip_low: BelowOne | None = 3e-4
    clip_high: AboveZero | None = 4e-4
    dual_clip: AboveOne | None = None

    equation = "L = agg_own( clip(s_i, A_i) ), s_i = exp( mean_t log π_θ/μ )"
    source = "arXiv 2507.18071, eq. 5-7"
    use = "Mixture-of-experts models, whose token ratios are noisy. Its clip is 3e-4 / 4e-4."


@dataclass(frozen=True, kw_only=True)
class GspoToken(Gspo):
    """GSPO-token: GSPO's value, with each token's own gradient."""

    name: Literal["gspo_token"] = "gspo_token"  # type: ignore[assignment]

    equation = "as gspo, s_it = sg(s_i) · π_θ / sg(π_θ)"
    source = "arXiv 2507.18071, eq. 13-14"
    use = "As gspo, where tokens have advantages of their own."


@dataclass(frozen=True, kw_only=True)
class Cispo(Clip, OwnTokens):
    """CISPO: the clip bounds the weight and never stops a token's gradient."""

    name: Literal["cispo"] = "cispo"
    aggregation: Aggregation = "token_mean"
    clip_low: BelowOne | None = None
    clip_high: AboveZero | None = 4.0

    equation = "L = agg_own( −sg(clamp(ρ, 1 − ε_low, 1 + ε_high)) A log π_θ )"
    source = "arXiv 2506.13585, eq. 4-5; upper bound 5 as in arXiv 2510.13786"
    use = "Rare tokens that start a reflection, which PPO's clip silences."


@dataclass(frozen=True, kw_only=True)
class Reinforce(OwnTokens):
    """REINFORCE on raw rewards."""

    name: Literal["reinforce"] = "reinforce"
    advantage: Baseline = "none"

    equation = "L = agg_own( −R log π_θ )"
    source = "Williams 1992"
    use = "A reference to compare with; only on fresh samples."
    fresh = True


@dataclass(frozen=True, kw_only=True)
class ReinforceBaseline(OwnTokens):
    """REINFORCE with the group's mean as baseline."""

    name: Literal["reinforce_baseline"] = "reinforce_baseline"

    equation = "L = agg_own( −(R − mean) log π_θ )"
    source = "Williams 1992"
    use = "The plainest useful policy gradient; only on fresh samples, one update a step."
    fresh = True


@dataclass(frozen=True, kw_only=True)
class Ppo(Clipped):
    """PPO with a critic: GAE, and a clipped value loss."""

    name: Literal["ppo"] = "ppo"
    advantage: Literal["none"] = "none"
    aggregation: Aggregation = "token_mean"
    turn_discount: None = None
    """A critic gives every token an advantage of its own."""
    discount: PositiveShare = 1.0
    """γ of returns: what a reward is worth one own token earlier."""
    gae_lambda: Share = 0.95
    """λ of GAE: 0 = advantages of one step, 1 = the whole return minus V."""
    whiten: bool = True
    """Whether tokens' advantages are whitened over the step's batch: minus their mean, over the root of
    their unbiased variance + 1e-8."""
    whiten_rewards: bool = False
    """Whether tokens' rewards, KL included, are first divided by the root of their unbiased variance + 1e-8 over
    the step's batch, with their mean kept (TRL's PPO)."""
    value_coefficient: NonNegative = 0.5
    """Coefficient of a critic's loss."""
    value_clip: AboveZero | None = 0.2
    """Greatest change of a critic's value that counts; null = any."""

    equation = "L = agg_own( clip(ρ, A_t) ) + c_V mean_own( ½ max((V − G)², (V_old + clamp(V − V_old, ±ε_V) − G)²) ); G = A + V_old before A is whitened"
    source = "arXiv 1707.06347, eq. 7; GAE arXiv 1506.02438, eq. 16"
    use = "Credit for single tokens by a critic (learner.critic), also with one sample a problem. See [PPO](ppo.md)."
    needs = ("behaviour", "values")


KINDS: tuple[type[ObjectiveConfig], ...] = (
    Grpo,
    DrGrpo,
    Dapo,
    Rloo,
    MaxRl,
    ReinforcePP,
    ReinforcePPBaseline,
    Gspo,
    GspoToken,
    Cispo,
    Reinforce,
    ReinforceBaseline,
    Ppo,
)
