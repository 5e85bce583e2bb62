"""The table of built-in objectives: equation, what it reads, source, when to use it, defaults.

Imports no torch: configs are checked and documented by it. The objectives themselves are in
:mod:`tandem.learner.objectives`, whose registry takes only names that stand here;
``docs/objectives.md`` is made of this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from .errors import ConfigError
from .import_path import is_import_path

ADVANTAGE = ("advantage",)
CLIP = ("clip_low", "clip_high", "dual_clip")
CUT = ("truncation", "stragglers")
OWN = (*ADVANTAGE, "aggregation", "own_advantage_weight", "max_probability", *CUT)
EXTRA = (
    "entropy_coefficient",
    "entropy_over",
    "entropy_target",
    "entropy_adapt",
    "entropy_step",
    "kl_coefficient",
    "kl_form",
    "kl_reward_coefficient",
    "kl_target",
    "kl_gain",
)
CORRECTION = ("correction", "correction_level", "correction_low", "correction_high")
EXPERT = (
    "shaping",
    "gamma",
    "shaping_exponent",
    "shaping_coefficient",
    "expert_behaviour",
    "expert_clip_low",
    "expert_clip_high",
    "expert_advantage_weight",
)
CLIPPED = (*OWN, *CLIP, "own_shaping", *EXTRA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of an objective without torch."""

    family: str
    """Heading of the page under which it stands."""
    summary: str
    """One line."""
    equation: str
    """Of the loss, in plain text."""
    source: str
    """Paper and equation, or whose code."""
    use: str
    """When to use it."""
    reads: tuple[str, ...]
    """Keys of ``learner.objective`` that change it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys that this name sets where a config doesn't."""
    fresh: bool = False
    """As it stands nothing holds stale own tokens: it needs ``replay.max_staleness=0``."""
    columns: tuple[str, ...] = ("behaviour",)
    """Log-probs that the trainer fills in."""
    pairs: bool = False
    """It compares two rows of a group with each other, whatever the advantage."""
    unit: Literal["row", "group"] = "row"
    """What no micro-batch splits."""
    alone: Literal["nothing", "by advantage", "always"] = "nothing"
    """What it learns from an expert's trace that is alone in its group, as in offline training:
    nothing; something where the trace's advantage isn't 0; or always something."""
    missing: str = ""
    """What it needs and no run has yet, and what to choose instead; such a name is refused."""

    @property
    def has_ratio(self) -> bool:
        """Whether own tokens that an older policy sampled are weighted or clipped by a ratio."""
        return not self.fresh or "clip_high" in self.reads


def _frozen(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType(values)


WITHOUT_GROUP = ("reinforce_pp", "none")
"""Advantages that don't compare a row with others of its group."""

PLAIN = "Policy gradients on own tokens"
STALE = "For stale samples"
EXPERTS = "With expert traces"
PAIRS = "Preferences"

_UNCLIPPED: dict[str, Any] = {"clip_low": None, "clip_high": None, "dual_clip": None}

OBJECTIVES: Mapping[str, Entry] = MappingProxyType(
    {
        "grpo": Entry(
            family=PLAIN,
            summary="GRPO: the clipped surrogate with the group's mean as baseline.",
            equation="L = agg_own( max(−A ρ, −A clamp(ρ, 1 − ε_low, 1 + ε_high)) ), at most −A c where A < 0; ρ = π_θ/μ",
            source="arXiv 2402.03300, eq. 3; dual clip arXiv 1912.09729, eq. 5",
            use="The default: reinforcement from verifiable rewards, samples up to some steps old.",
            reads=CLIPPED,
        ),
        "dr_grpo": Entry(
            family=PLAIN,
            summary="Dr. GRPO: no division by the standard deviation or by each answer's length.",
            equation="as grpo, A = R − mean(R), agg = Σ / (longest response × rows)",
            source="arXiv 2503.20783, section 3.2",
            use="Where the lengths of wrong answers drift; what grpo does here by default.",
            reads=CLIPPED,
            defaults=_frozen(advantage="group_mean", aggregation="constant"),
        ),
        "dapo": Entry(
            family=PLAIN,
            summary="DAPO: clip-higher and a mean over all tokens.",
            equation="as grpo, ε_low = 0.2, ε_high = 0.28, A = (R − mean) / std, agg = Σ / tokens",
            source="arXiv 2503.14476, eq. 8 and 10-12 (overlong shaping is the reward component dapo_overlong; groups without a signal stay in the batch: there is no dynamic sampling)",
            use="Long answers, where entropy falls too soon under a symmetric clip.",
            reads=CLIPPED,
            defaults=_frozen(
                advantage="group_mean_std", aggregation="token_mean", clip_high=0.28, dual_clip=None
            ),
        ),
        "rloo": Entry(
            family=PLAIN,
            summary="RLOO: the mean of the group's other samples as baseline.",
            equation="as grpo, A_i = R_i − mean over j ≠ i of R_j = G/(G−1) (R_i − mean(R))",
            source="arXiv 2402.14740, eq. 3 (there without a clip)",
            use="An unbiased baseline for small groups.",
            reads=CLIPPED,
            defaults=_frozen(advantage="leave_one_out"),
        ),
        "max_rl": Entry(
            family=PLAIN,
            summary="MaxRL: advantages over the group's mean reward, which weighs hard problems up.",
            equation="as grpo, A = (R − mean) / mean, 0 where the mean is 0",
            source="arXiv 2602.02710, algorithm 1",
            use="Rewards of 0 and 1, many problems that are rarely solved.",
            reads=CLIPPED,
            defaults=_frozen(advantage="max_rl"),
        ),
        "reinforce_pp": Entry(
            family=PLAIN,
            summary="REINFORCE++: rewards whitened over the whole batch, no groups needed.",
            equation="as grpo, A = (R − mean over the batch) / std over the batch, by tokens",
            source="arXiv 2501.03262, eq. 8",
            use="One sample a problem, or problems whose groups are mostly equal.",
            reads=CLIPPED,
            defaults=_frozen(advantage="reinforce_pp", aggregation="token_mean"),
        ),
        "reinforce_pp_baseline": Entry(
            family=PLAIN,
            summary="REINFORCE++ with the group's mean taken off before the batch is whitened.",
            equation="as grpo, A = whiten(R − mean of the group) over the batch, by tokens",
            source="arXiv 2501.03262, section 3.3",
            use="As reinforce_pp, with several samples a problem.",
            reads=CLIPPED,
            defaults=_frozen(advantage="reinforce_pp_baseline", aggregation="token_mean"),
        ),
        "gspo": Entry(
            family=PLAIN,
            summary="GSPO: one ratio a sequence, the geometric mean of its tokens'.",
            equation="L = agg_own( clip(s_i, A_i) ), s_i = exp( mean_t log π_θ/μ )",
            source="arXiv 2507.18071, eq. 5-7",
            use="Mixture-of-experts models, whose token ratios are noisy. Its clip is 3e-4 / 4e-4.",
            reads=(*OWN, *CLIP, *EXTRA),
            defaults=_frozen(
                advantage="group_mean_std",
                aggregation="sequence_mean",
                clip_low=3e-4,
                clip_high=4e-4,
                dual_clip=None,
            ),
        ),
        "gspo_token": Entry(
            family=PLAIN,
            summary="GSPO-token: GSPO's value, with each token's own gradient.",
            equation="as gspo, s_it = sg(s_i) · π_θ / sg(π_θ)",
            source="arXiv 2507.18071, eq. 13-14",
            use="As gspo, where tokens have advantages of their own.",
            reads=(*OWN, *CLIP, *EXTRA),
            defaults=_frozen(
                advantage="group_mean_std",
                aggregation="sequence_mean",
                clip_low=3e-4,
                clip_high=4e-4,
                dual_clip=None,
            ),
        ),
        "cispo": Entry(
            family=PLAIN,
            summary="CISPO: the clip bounds the weight and never stops a token's gradient.",
            equation="L = agg_own( −sg(clamp(ρ, 1 − ε_low, 1 + ε_high)) A log π_θ )",
            source="arXiv 2506.13585, eq. 4-5; upper bound 5 as in arXiv 2510.13786",
            use="Rare tokens that start a reflection, which PPO's clip silences.",
            reads=(*OWN, "clip_low", "clip_high", *EXTRA),
            defaults=_frozen(
                aggregation="token_mean", clip_low=None, clip_high=4.0, dual_clip=None
            ),
        ),
        "reinforce": Entry(
            family=PLAIN,
            summary="REINFORCE on raw rewards.",
            equation="L = agg_own( −R log π_θ )",
            source="Williams 1992",
            use="A reference to compare with; only on fresh samples.",
            reads=(*OWN, *EXTRA),
            defaults=_frozen(advantage="none", **_UNCLIPPED),
            fresh=True,
        ),
        "reinforce_baseline": Entry(
            family=PLAIN,
            summary="REINFORCE with the group's mean as baseline.",
            equation="L = agg_own( −(R − mean) log π_θ )",
            source="Williams 1992",
            use="The plainest useful policy gradient; only on fresh samples, one update a step.",
            reads=(*OWN, *EXTRA),
            defaults=_frozen(**_UNCLIPPED),
            fresh=True,
        ),
        "ppo": Entry(
            family=PLAIN,
            summary="PPO with a critic: GAE, and a clipped value loss.",
            equation="L = agg_own( clip(ρ, A_t) ) + c_V mean_own( ½ max((V − G)², (V_old + clamp(V − V_old, ±ε_V) − G)²) )",
            source="arXiv 1707.06347, eq. 7; GAE arXiv 1506.02438, eq. 16",
            use="Rewards along the way, for trainers with a critic.",
            reads=(*CLIPPED, "value_coefficient", "value_clip"),
            columns=("behaviour", "values"),
            missing="values of a critic, which no run trains yet: choose grpo, or rloo with a baseline "
            "that needs no critic",
        ),
        "tis": Entry(
            family=STALE,
            summary="Truncated importance sampling: a policy gradient weighted by min(ρ, C).",
            equation="L = agg_own( −sg(min(π_θ/μ, C)) A log π_θ )",
            source="IMPALA, arXiv 1802.01561; Yao et al. 2025, “Your efficient RL framework secretly brings you off-policy RL training”",
            use="Differences of numerics between engine and learner. It bounds the weight from above only: on samples several steps old it collapses.",
            reads=(*OWN, *CORRECTION, *EXTRA),
            defaults=_frozen(correction="truncate", correction_high=2.0, **_UNCLIPPED),
        ),
        "icepop": Entry(
            family=STALE,
            summary="IcePop: tokens on which engine and learner disagree leave the gradient.",
            equation="L = agg_own( −sg(M(π_θ/μ)) A log π_θ ), M(k) = k where α ≤ k ≤ β, else 0",
            source="INTELLECT-3, arXiv 2512.16144, eq. 1, with the α = 0.5 and β = 5 of Ring-1T, arXiv 2510.18855, where the mask stands before PPO's clip: decoupled_ppo with correction=mask",
            use="Mixture-of-experts models, quantised engines.",
            reads=(*OWN, *CORRECTION, *EXTRA),
            defaults=_frozen(
                correction="mask", correction_low=0.5, correction_high=5.0, **_UNCLIPPED
            ),
        ),
        "mis": Entry(
            family=STALE,
            summary="Masked importance sampling: sequences that have drifted too far leave.",
            equation="L = agg_own( −sg(w 1[w ≤ C]) A log π_θ ), w = Π_t π_θ/μ over the sequence",
            source="Liu et al. 2025, “When speed kills stability”; token level: correction_level=token",
            use="Long runs on a mismatched engine, where truncation lets bad sequences through.",
            reads=(*OWN, *CORRECTION, *EXTRA),
            defaults=_frozen(
                correction="mask",
                correction_level="sequence",
                correction_low=0.0,
                correction_high=2.0,
                **_UNCLIPPED,
            ),
        ),
        "decoupled_ppo": Entry(
            family=STALE,
            summary="Decoupled PPO: the clip is around the step's first weights, stale samples are weighted apart.",
            equation="L = agg_own( sg(w(π_prox/μ)) · clip(π_θ/π_prox, A) ), w capped or masked",
            source="AReaL, arXiv 2505.24298, eq. 5; Hilton et al., arXiv 2110.00641",
            use="Samples several steps old with several updates a step. It can't be had without its behaviour weight (correction=none is refused).",
            reads=(*OWN, *CLIP, *CORRECTION, *EXTRA),
            defaults=_frozen(correction="truncate", correction_high=2.0),
            columns=("behaviour", "proximal"),
        ),
        "luffy": Entry(
            family=EXPERTS,
            summary="LUFFY with a clip on own tokens: expert traces in the group, shaped weights.",
            equation="L = agg( own: clip(ρ, A); expert: −A f(w) ), f(w) = w/(w + γ), w = π_θ/π_φ, π_φ = 1 where not recorded",
            source="arXiv 2504.14945, eq. 6-8; own tokens clipped as in grpo",
            use="Problems that the model never solves by itself and an expert has; asynchronous runs.",
            reads=(*CLIPPED, *EXPERT),
            alone="by advantage",
        ),
        "luffy_paper": Entry(
            family=EXPERTS,
            summary="LUFFY as in the paper: mean over all tokens, no clip, entropy bonus 0.01.",
            equation="L = Σ( own: −A ρ; expert: −A f(π_θ) ) / Σ tokens − 0.01 mean(H), γ = 0.1",
            source="arXiv 2504.14945, eq. 6-8, with its best row's “no clip”",
            use="To reproduce the paper.",
            reads=(*CLIPPED, *EXPERT),
            defaults=_frozen(
                advantage="group_mean",
                aggregation="token_mean",
                expert_behaviour="one",
                entropy_coefficient=0.01,
                entropy_over="all",
                **_UNCLIPPED,
            ),
            fresh=True,
            alone="by advantage",
        ),
        "luffy_code": Entry(
            family=EXPERTS,
            summary="LUFFY as in its code: Σ over the padded width, no division by rows.",
            equation="L = Σ( own: −A ρ; expert: −A f(π_θ), or −A π_θ/(π_φ + 1e-6) where recorded ) / width − 0.001 mean(H)",
            source="github.com/ElliottYan/LUFFY at 01f4ae0; but means are over the update, not summed over micro-batches",
            use="To reproduce the published runs; the learning rate is tied to the longest response and the number of rows.",
            reads=(*CLIPPED, *EXPERT),
            defaults=_frozen(
                advantage="group_mean",
                aggregation="width",
                expert_behaviour="published",
                entropy_coefficient=0.001,
                entropy_over="all",
                **_UNCLIPPED,
            ),
            fresh=True,
            alone="by advantage",
        ),
        "rl_sft_loss": Entry(
            family=EXPERTS,
            summary="GRPO on own tokens plus a supervised loss on expert tokens.",
            equation="L = L_GRPO(own) + c · mean_expert(−log π_θ), experts at temperature 1",
            source="“RL w/ SFT loss” of arXiv 2504.14945 (advantage own_mean in its code)",
            use="The simple mixture to compare others with.",
            reads=(*CLIPPED, "sft_coefficient"),
            alone="always",
        ),
        "sft": Entry(
            family=EXPERTS,
            summary="Supervised fine-tuning on expert tokens.",
            equation="L = agg_expert( −log π_θ ), at temperature 1",
            source="cross entropy; denominators over the update, whatever the micro-batch",
            use="Many good traces, before reinforcement or instead of it; `tandem offline`.",
            reads=("aggregation",),
            columns=(),
            alone="always",
        ),
        "exgrpo": Entry(
            family=EXPERTS,
            summary="ExGRPO: own past successes replayed in groups of their own share.",
            equation="L = (1 − ρ) L_GRPO(fresh groups) + ρ L_LUFFY(groups with a replayed row), w* = π_θ/π_past as recorded",
            source="arXiv 2510.02245; buckets as in its code: tandem.learner.recipes.as_published.bucket_weights",
            use="Hard problems that the model has solved before and seldom solves again.",
            reads=(*CLIPPED, *EXPERT, "replay_share"),
            unit="group",
            missing="own past successes, which no ledger brings back yet: choose luffy with "
            "expert.per_group=1 for traces, or grpo",
        ),
        "chord": Entry(
            family=EXPERTS,
            summary="CHORD: from imitation to reinforcement on a schedule, certain tokens weighted down.",
            equation="L = (1 − μ) L_GRPO(own) + μ mean_expert( −sg(p (1 − p)) log π_θ ), μ: warm-up, then cosine",
            source="arXiv 2508.11408; μ, φ and the sum as in its code (github.com/modelscope/Trinity-RFT, mix_chord)",
            use="Traces of another style than the model's, which plain SFT would overfit.",
            reads=(*CLIPPED, "mu_peak", "mu_valley", "mu_warmup_steps", "mu_decay_steps"),
            alone="always",
        ),
        "rl_plus": Entry(
            family=EXPERTS,
            summary="RL-PLUS: expert tokens weighted against a mixture, unlikely right tokens first.",
            equation="L = agg( own: −A ρ; expert: −A (1 − sg π_θ)^γ · 2 π_θ / (½ (π_prox + 1) + π_prox) )",
            source="arXiv 2508.00222, as in its code (github.com/YihongDong/RL-PLUS: γ = 0.5, no clip)",
            use="Expert traces without log-probs; only on fresh samples.",
            reads=(*CLIPPED, "expert_advantage_weight", "exploration_power"),
            defaults=_frozen(**_UNCLIPPED),
            fresh=True,
            columns=("behaviour", "proximal"),
            alone="by advantage",
        ),
        "srft": Entry(
            family=EXPERTS,
            summary="SRFT: SFT and reinforcement in one stage, weighted by entropy.",
            equation="L = ½ sg(e^−H_expert) mean_expert(−log π) + agg_expert(−A w) + mean_own( R > 0: −0.1 sg(e^H_own) log π; else: log π )",
            source="arXiv 2506.19767 (signs as in the paper; no clip on demonstrations, as in LUFFY)",
            use="To compare with; it needs a pass for the entropies, and fresh samples.",
            reads=("advantage", "aggregation", *EXPERT, *EXTRA, *CUT),
            defaults=_frozen(shaping="none", aggregation="token_mean", **_UNCLIPPED),
            fresh=True,
            columns=("behaviour", "current"),
            alone="always",
        ),
        "prefix_rft": Entry(
            family=EXPERTS,
            summary="Prefix-RFT: the model goes on from a prefix of a demonstration.",
            equation="as dr_grpo on own tokens; prefix tokens: the clip on π_θ/π_prox, only on the 20% of greatest entropy",
            source="arXiv 2507.01679",
            use="Rows that begin with an expert's prefix: expert.per_group=1, expert.prefix=cosine.",
            reads=(*CLIPPED, "expert_advantage_weight", "entropy_share"),
            columns=("behaviour", "proximal"),
            alone="by advantage",
        ),
        "dpo": Entry(
            family=PAIRS,
            summary="DPO on pairs of a group's rows.",
            equation="L = mean_pairs( −log σ(β [(log π_w − log π_l) − (log ref_w − log ref_l)]) )",
            source="arXiv 2305.18290, eq. 7; label smoothing: conservative DPO",
            use="Preferences, or verifiable rewards as preferences, offline or online.",
            reads=("beta", "label_smoothing"),
            columns=("reference",),
            pairs=True,
            unit="group",
        ),
        "kto": Entry(
            family=PAIRS,
            summary="KTO on single rows, good or bad.",
            equation="L = mean_rows( λ_D (1 − σ(β (r − z₀))) or λ_U (1 − σ(β (z₀ − r))) ), r = log π/ref, z₀ = sg(KL) of the update",
            source="arXiv 2402.01306, eq. 8; z₀ from own samples instead of mismatched pairs",
            use="Thumbs up and down without pairs.",
            reads=("advantage", "beta", "desirable_weight", "undesirable_weight"),
            columns=("reference", "current"),
            alone="by advantage",
        ),
        "orpo": Entry(
            family=PAIRS,
            summary="ORPO: cross entropy and log-odds, no reference.",
            equation="L = mean_pairs( −m_w − β log σ(log odds_w − log odds_l) ), m = mean log π",
            source="arXiv 2403.07691, eq. 6-7",
            use="Preferences from a base model in one stage.",
            reads=("beta",),
            columns=(),
            pairs=True,
            unit="group",
        ),
        "cpo": Entry(
            family=PAIRS,
            summary="CPO: DPO without a reference, plus cross entropy.",
            equation="L = mean_pairs( −log σ(β (log π_w − log π_l)) − c · mean log π_w )",
            source="arXiv 2401.08417, eq. 3-5",
            use="As dpo, where a reference model doesn't fit.",
            reads=("beta", "sft_coefficient"),
            columns=(),
            pairs=True,
            unit="group",
        ),
    }
)
"""Values of ``learner.objective.name``, beside import paths."""


def check_name(name: str) -> None:
    """Raises ``ConfigError`` for what is neither a built-in name nor looks like an import path."""
    if name in OBJECTIVES or is_import_path(name):
        return
    near = difflib.get_close_matches(name, OBJECTIVES, n=1, cutoff=0.5)
    raise ConfigError(
        f"learner.objective.name={name!r} is no objective{f' (did you mean {near[0]}?)' if near else ''}"
        f": choose one of {', '.join(OBJECTIVES)}, or name your own as package.module:function"
    )


def least_verdicts(name: str, advantage: str) -> int:
    """Own samples with a verdict that a group needs for this objective to learn from it.

    Two where the rows of a group are compared, as pairs or against the group's mean; one where each
    stands for itself. Of an objective of your own the advantage decides, as of any other.

    >>> (
    ...     least_verdicts("grpo", "group_mean"),
    ...     least_verdicts("grpo", "none"),
    ...     least_verdicts("sft", ""),
    ... )
    (2, 1, 1)
    """
    entry = OBJECTIVES.get(name)
    if entry is not None and entry.pairs:
        return 2
    if entry is not None and "advantage" not in entry.reads:
        return 1
    return 1 if advantage in WITHOUT_GROUP else 2


def renamed(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section ``learner.objective`` for another name: what the new name sets by itself is left to
    it, since the section set it for the old one.

    >>> renamed({"name": "luffy", "advantage": "group_mean", "gamma": 0.2}, "reinforce_pp")
    {'name': 'reinforce_pp', 'gamma': 0.2}
    """
    entry = OBJECTIVES.get(name)
    if name == section.get("name", "grpo") or entry is None:
        return {**section, "name": name}
    return {k: v for k, v in section.items() if k not in entry.defaults} | {"name": name}


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """A section ``learner.objective`` with what its name sets filled in where it says nothing."""
    entry = OBJECTIVES.get(str(given.get("name", "grpo")))
    return {**(entry.defaults if entry is not None else {}), **given}
