"""Own attempts and expert traces in one loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .keys import (
    Aggregated,
    Aggregation,
    Baseline,
    Clipped,
    Expert,
    ExpertBehaviour,
    ExpertWeight,
    NonNegative,
    ObjectiveConfig,
    PositiveShare,
    Shaping,
    Share,
    Steps,
    SupervisedTerm,
    Unclipped,
)


@dataclass(frozen=True, kw_only=True)
class Luffy(Expert, Clipped):
    """LUFFY with a clip on own tokens: expert traces in the group, shaped weights."""

    name: Literal["luffy"] = "luffy"

    equation = "L = agg( own: clip(ρ, A); expert: −A f(w) ), f(w) = w/(w + γ), w = π_θ/π_φ, π_φ = 1 where not recorded"
    source = "arXiv 2504.14945, eq. 6-8; own tokens clipped as in grpo"
    use = "Problems that the model never solves by itself and an expert has; asynchronous runs."
    alone = "by advantage"


@dataclass(frozen=True, kw_only=True)
class LuffyPaper(Unclipped, Expert, Clipped):
    """LUFFY as in the paper: mean over all tokens, no clip, entropy bonus 0.01."""

    name: Literal["luffy_paper"] = "luffy_paper"
    advantage: Baseline = "group_mean"
    aggregation: Aggregation = "token_mean"
    expert_behaviour: ExpertBehaviour = "one"
    entropy_coefficient: float = 0.01
    entropy_over: Literal["own", "all"] = "all"

    equation = "L = Σ( own: −A ρ; expert: −A f(π_θ) ) / Σ tokens − 0.01 mean(H), γ = 0.1"
    source = "arXiv 2504.14945, eq. 6-8, with its best row's “no clip”"
    use = "To reproduce the paper."
    fresh = True
    alone = "by advantage"


@dataclass(frozen=True, kw_only=True)
class LuffyCode(Unclipped, Expert, Clipped):
    """LUFFY as in its code: Σ over the padded width, no division by rows."""

    name: Literal["luffy_code"] = "luffy_code"
    advantage: Baseline = "group_mean"
    aggregation: Aggregation = "width"
    expert_behaviour: ExpertBehaviour = "published"
    entropy_coefficient: float = 0.001
    entropy_over: Literal["own", "all"] = "all"

    equation = "L = Σ( own: −A ρ; expert: −A f(π_θ), or −A π_θ/(π_φ + 1e-6) where recorded ) / width − 0.001 mean(H)"
    source = "github.com/ElliottYan/LUFFY at 01f4ae0; but means are over the update, not summed over micro-batches"
    use = "To reproduce the published runs; the learning rate is tied to the longest response and the number of rows."
    fresh = True
    alone = "by advantage"

    @property
    def columns(self) -> frozenset[str]:
        return super().columns if self.max_probability is None else super().columns | {"current"}


@dataclass(frozen=True, kw_only=True)
class RlSftLoss(SupervisedTerm, Clipped):
    """GRPO on own tokens plus a supervised loss on expert tokens."""

    name: Literal["rl_sft_loss"] = "rl_sft_loss"

    equation = "L = L_GRPO(own) + c · mean_expert(−log π_θ), experts at temperature 1"
    source = "“RL w/ SFT loss” of arXiv 2504.14945 (advantage own_mean in its code)"
    use = "The simple mixture to compare others with."
    alone = "always"


@dataclass(frozen=True, kw_only=True)
class Sft(Aggregated):
    """Supervised fine-tuning on expert tokens."""

    name: Literal["sft"] = "sft"

    equation = "L = agg_expert( −log π_θ ), at temperature 1"
    source = "cross entropy; denominators over the update, whatever the micro-batch"
    use = "Many good traces, before reinforcement or instead of it; `tandem offline`."
    needs = ()
    alone = "always"


@dataclass(frozen=True, kw_only=True)
class ExGrpo(Expert, Clipped):
    """ExGRPO: own past successes replayed in groups of their own share."""

    name: Literal["exgrpo"] = "exgrpo"
    replay_share: Share = 0.5
    """Weight ρ in exgrpo of the groups with a replayed row."""
    replay_from: Share = 0.35
    """Share of right samples in a step from which on exgrpo brings successes back."""

    equation = "L = (1 − ρ) L_GRPO(fresh groups) + ρ L_LUFFY(groups with a replayed row), w* = π_θ/π_past as recorded"
    source = "arXiv 2510.02245; a problem comes in its turn, and with its success by the weights of the paper's buckets"
    use = "Hard problems that the model has solved before and seldom solves again."
    unit = "group"


@dataclass(frozen=True, kw_only=True)
class Chord(Clipped):
    """CHORD: from imitation to reinforcement on a schedule, certain tokens weighted down."""

    name: Literal["chord"] = "chord"
    mu_peak: Share = 0.9
    """Greatest value of chord's μ."""
    mu_valley: Share = 0.05
    """Final value of chord's μ."""
    mu_warmup_steps: Steps = 0
    """Steps to the peak of μ."""
    mu_decay_steps: Steps = 200
    """Steps from the peak of μ to the valley."""

    equation = (
        "L = (1 − μ) L_GRPO(own) + μ mean_expert( −sg(p (1 − p)) log π_θ ), μ: warm-up, then cosine"
    )
    source = "arXiv 2508.11408; μ, φ and the sum as in its code (github.com/modelscope/Trinity-RFT, mix_chord)"
    use = "Traces of another style than the model's, which plain SFT would overfit."
    alone = "always"


@dataclass(frozen=True, kw_only=True)
class RlPlus(Unclipped, ExpertWeight, Clipped):
    """RL-PLUS: expert tokens weighted against a mixture, unlikely right tokens first."""

    name: Literal["rl_plus"] = "rl_plus"
    exploration_power: NonNegative = 0.5
    """Exponent γ of rl_plus in A (1 − π_θ)^γ."""

    equation = "L = agg( own: −A ρ; expert: −A (1 − sg π_θ)^γ · 2 π_θ / (½ (π_prox + 1) + π_prox) )"
    source = "arXiv 2508.00222, as in its code (github.com/YihongDong/RL-PLUS: γ = 0.5, no clip)"
    use = "Expert traces without log-probs; only on fresh samples."
    fresh = True
    needs = ("behaviour", "proximal")
    alone = "by advantage"


@dataclass(frozen=True, kw_only=True)
class Srft(Expert):
    """SRFT: SFT and reinforcement in one stage, weighted by entropy."""

    name: Literal["srft"] = "srft"
    shaping: Shaping = "none"
    aggregation: Aggregation = "token_mean"

    equation = "L = ½ sg(e^−H_expert) mean_expert(−log π) + agg_expert(−A w) + mean_own( R > 0: −0.1 sg(e^H_own) log π; else: log π )"
    source = "arXiv 2506.19767 (signs as in the paper; no clip on demonstrations, as in LUFFY)"
    use = "To compare with; it needs a pass for the entropies, and fresh samples."
    fresh = True
    needs = ("behaviour", "current")
    alone = "always"


@dataclass(frozen=True, kw_only=True)
class PrefixRft(ExpertWeight, Clipped):
    """Prefix-RFT: the model goes on from a prefix of a demonstration."""

    name: Literal["prefix_rft"] = "prefix_rft"
    entropy_share: PositiveShare = 0.2
    """Share of a prefix's tokens, those with the greatest entropy, that prefix_rft learns from."""

    equation = "as dr_grpo on own tokens; prefix tokens: the clip on π_θ/π_prox, only on the 20% of greatest entropy"
    source = "arXiv 2507.01679"
    use = "Rows that begin with an expert's prefix: expert.per_group=1, expert.prefix=cosine."
    needs = ("behaviour", "proximal")
    alone = "by advantage"


KINDS: tuple[type[ObjectiveConfig], ...] = (
    Luffy,
    LuffyPaper,
    LuffyCode,
    RlSftLoss,
    Sft,
    ExGrpo,
    Chord,
    RlPlus,
    Srft,
    PrefixRft,
)
