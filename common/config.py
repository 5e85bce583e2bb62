"""The configuration tree: one typed, validated description of a run.

A run is a preset (YAML) plus overrides ``a.b=c``. Unknown keys and wrong types are refused
with the nearest valid key named. The resolved tree is saved in the run's folder, and a
resumed run may change only what :data:`CHANGEABLE` lists.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from .choices import why_refused
from .errors import ConfigError
from .objectives import OBJECTIVES, least_verdicts, renamed, with_defaults
from .prefixes import PrefixSchedule
from .printable import printable

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]

ENGINES = ("auto", "torch", "vllm")
"""Engines by name; any other is named by its import path."""
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _engine(name: str) -> str:
    if name in ENGINES or _IMPORT_PATH.fullmatch(name):
        return name
    raise ValueError(f"should be {', '.join(ENGINES)}, or an import path package.module:factory")


EngineName = Annotated[str, AfterValidator(_engine)]


VLLM_SETTINGS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    **{
        name: f"rollout.vllm.{name}"
        for name in ("max_model_len", "max_num_seqs", "gpu_memory_utilization", "enforce_eager")
    },
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_mb",
    "data_parallel_size": "rollout.workers",
}
"""Engine arguments of vLLM's that are settings of Tandem's."""
VLLM_FIXED = ("generation_config", "logprobs_mode", "skip_tokenizer_init", "worker_extension_cls")
"""Those on whose values its correctness rests."""

VLLM_RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
"""Their product is an engine's ranks."""


def _no_settings(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM's arguments, none of which Tandem sets itself."""
    for name in args:
        if name in VLLM_SETTINGS:
            raise ValueError(f"{name} is set by {VLLM_SETTINGS[name]}")
        if name in VLLM_FIXED:
            raise ValueError(f"{name} is Tandem's to set: right log-probs and weights rest on it")
        if name in VLLM_RANKS and (type(args[name]) is not int or args[name] < 1):
            raise ValueError(f"{name} should be a positive number, not {args[name]!r}")
    return args


def _on_or_off(value: Any) -> Any:
    """YAML reads a bare ``off`` as false and ``on`` as true."""
    return {True: "online", False: "off"}[value] if isinstance(value, bool) else value


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class RunConfig(Section):
    """What the run is called, where it lives and how long it goes."""

    dir: str | None = None
    """The run's folder; None = ``runs/<preset>``."""
    seed: int = 0
    """Seeds the order of problems, sampling noise and mixing."""
    steps: NonNegative | None = None
    """Ledger batches to train on. Set this or ``passes``."""
    passes: Positive | None = None
    """Passes over the data; the last step may then be short."""
    deterministic: bool = False
    """The same seed gives the same parameters bit for bit, whoever is killed on the way: on-policy,
    one group an engine batch, no group deadline (what :data:`DETERMINISTIC` lists is set so). Holds
    for the torch engine on CPUs with as many threads and ranks; slower. One clock is left: a text
    on which a grader hangs."""


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = "miniature"
    """A Hugging Face folder, a hub name, or ``miniature`` for the model that is shipped."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the learner's forward and backward; master weights stay fp32."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """``auto``: flash_attention_2 where CUDA and the package are there, else sdpa; eager where sdpa
    can't do what the model does (a cap of the scores, attention sinks)."""


class SourceConfig(Section):
    """One parquet file (or folder of them) of problems, with LUFFY's columns."""

    path: str
    """Relative to the working directory; ``{run}`` stands for the run's folder."""
    name: str | None = None
    """Short name for metrics and ids; None = the file's stem."""
    weight: Positive = 1
    """Problems taken from this source for each ``weight`` of the others."""

    @property
    def short_name(self) -> str:
        """The name given, or the stem of its path."""
        return self.name or Path(self.path).stem


class EvalSetConfig(Section):
    """One held-out set."""

    path: str
    """Parquet; ``{run}`` stands for the run's folder."""
    name: str = "heldout"
    """Names its metrics."""
    limit: Positive | None = None
    """First so many problems; None = all."""


class DataConfig(Section):
    """Problems, expert traces and held-out sets."""

    train: tuple[SourceConfig, ...] = ()
    """Mixed by ``weight``, each in its own seeded permutation."""
    evaluate: tuple[EvalSetConfig, ...] = ()
    """Held-out sets."""
    miniature: Literal["hard", "easy"] | None = None
    """Write the miniature's parquet files into ``{run}/data`` before anything reads them."""
    miniature_traces: NonNegative = 4
    """Expert traces that exist in the miniature's hard setting."""
    miniature_fresh: Positive = 1200
    """Problems without a trace that the miniature writes."""
    system_prompt: str | None = None
    """Put before the messages of a row that has none of its own."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt is refused at ingest (``overlong``)."""
    overlong: Literal["drop", "refuse"] = "drop"
    """Drop (and count) or refuse prompts and traces over their limits; never cut them."""
    bad_golds: Literal["refuse", "drop"] = "refuse"
    """Refuse, or drop (and count), problems whose gold answer the grader can't read."""


class ExpertConfig(Section):
    """How expert traces enter groups."""

    per_group: NonNegative = 0
    """Traces that take the place of own samples, where a problem has any (LUFFY: 1)."""
    when: Literal["always", "all_failed"] = "always"
    """``always``: traces are chosen at admission, and so many own samples fewer are asked for.
    ``all_failed``: all G own samples are asked for, and where not one of them is correct, traces
    replace some, drawn by key."""
    accept: tuple[str, ...] = ("correct",)
    """Verdicts that a trace must have to enter."""
    negative: bool = False
    """Let expert tokens with a negative advantage into the loss."""
    prefix: PrefixSchedule | None = None
    """Samples begin with a part of a trace and the policy goes on; None = traces enter whole. Which
    part: ``fixed``: evenly spaced from ``prefix_low`` to ``prefix_high``; ``random``: drawn between
    them; ``linear``: from ``prefix_high`` down to 0; ``linear_max`` and ``reverse_linear``: drawn
    from 0 to a greatest share that falls, or grows, by tenths; ``cosine``: drawn between a least
    share, which falls to ``prefix_low`` on half a cosine, and ``prefix_high`` (Prefix-RFT)."""
    prefix_low: Share = 0.0
    """Least share of a trace."""
    prefix_high: Share = 0.95
    """Greatest share of a trace; at least its last token is left to the policy."""
    prefix_steps: Positive | None = None
    """Steps over which the schedules in time run; None = ``run.steps``."""


class VllmConfig(Section):
    """The vLLM engine of a rollout worker; not read by the torch engine."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory for weights and keys and values; lower where a learner shares
    the card."""
    kv_cache_mb: Positive | None = None
    """Memory for keys and values, MiB; None = what ``gpu_memory_utilization`` leaves, and 1024
    without a GPU."""
    max_model_len: Positive | None = None
    """Most tokens of prompt and response; None = ``data.max_prompt_tokens`` and
    ``rollout.max_new_tokens`` together."""
    max_num_seqs: Positive | None = None
    """Most samples that run at a time; None = those of ``groups_per_batch`` groups, and at least
    256."""
    enforce_eager: bool | None = None
    """Without compilation and CUDA graphs: a quicker start, slower sampling. None = only without
    a GPU."""
    start_seconds: Seconds = 900.0
    """Deadline for vLLM to load the model and to be ready."""
    args: Annotated[Mapping[str, Any], AfterValidator(_no_settings)] = Field(default_factory=dict)
    """Further fields of vLLM's ``AsyncEngineArgs``, passed on as they are, such as
    ``quantization: fp8`` or, for ranks on CPUs, ``tensor_parallel_size: 2``."""


class RolloutConfig(Section):
    """Rollout workers and what they sample."""

    engine: EngineName = "auto"
    """``auto``: vLLM where it is installed and a GPU is there, else the torch engine. ``torch``,
    ``vllm``, or ``package.module:factory``, an engine of your own (:mod:`tandem.rollout.engines`)."""
    workers: NonNegative = 1
    """Processes that ``start_all.sh`` starts."""
    gpus_per_worker: Positive = 1
    """Tensor-parallel size of each engine, where there are GPUs."""
    group_size: Positive = 8
    """G: rows of a group, expert traces included."""
    groups_per_batch: Positive = 8
    """Most groups that one worker holds at a time."""
    max_new_tokens: Positive = 1024
    """Most tokens of a response."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Of training rollouts; vLLM takes none over 2."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Training refuses anything under 1 (the learner's log-probs are over all tokens)."""
    threads: Positive = 1
    """CPU threads of one worker."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the engine's weights and arithmetic, and so of new weights on their way to it; None =
    ``model.dtype``."""
    recompute_kv: bool = True
    """Recompute the KV cache of running requests when the weights change."""
    update_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Longest that new weights wait for the running samples to end before they change them in
    flight; meanwhile no sample begins. Pays where samples are short and the cache dear."""
    groups_ahead: NonNegative = 0
    """Groups leased beyond ``groups_per_batch``, so that the engine never waits for a lease;
    they need ``replay.max_staleness`` of 2 or more to be admitted while a step is trained on."""
    vllm: VllmConfig = VllmConfig()


class ComponentConfig(Section):
    """One reward component."""

    name: str
    """In the registry of :mod:`tandem.reward.components`, or a function's import path."""
    weight: float = 1.0
    """Factor in the sum; 0 records the component without paying it."""
    gate: bool = False
    """The whole reward is 0 where this component isn't above ``gate_above``."""
    gate_above: float = 0.0
    """See ``gate``."""
    params: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the component."""
    scope: Literal["sample", "group"] = "sample"
    """Of a function of your own, which is called with a whole group: ``sample`` says that each
    completion's value is its own affair, so that after a call that hung or raised each is tried
    alone; ``group`` that it compares them, so that such a call is the whole group's failure."""
    deadline_seconds: Seconds | None = None
    """Of one call of a function of your own; null = ``reward.deadline_seconds``."""


class RewardConfig(Section):
    """The reward pool."""

    pools: NonNegative = 1
    """Processes that ``start_all.sh`` starts."""
    graders: Positive = 2
    """Grader processes of one pool; half as many more stand in while slow texts hold them."""
    mode: str = "boxed"
    """How an answer is read and compared: a name in :mod:`tandem.reward.answers`."""
    tuple_for_set: bool = True
    """Whether an ordered tuple, ``(1,2)``, is right for a set in braces, ``\\{1,2\\}``, in its order."""
    deadline_seconds: Seconds = 3.0
    """A grader past this is killed and its text gets the verdict ``timeout``; put off while other
    processes keep the grader from its core (docs/grading.md)."""
    memory_mb: Positive = 1024
    """Address-space limit of a grader."""
    timeout_pays: float = 0.0
    """Reward of the verdicts ``timeout`` and ``memory``, which are the text's own doing."""
    components: tuple[ComponentConfig, ...] = (
        ComponentConfig(name="accuracy"),
        ComponentConfig(name="format", weight=0.0),
    )
    """The reward is the weighted sum of these, after the gates."""
    own_reward: float | None = None
    """Pays every own sample this instead (a control: does reinforcement do the learning?)."""


class ReplayConfig(Section):
    """The ledger."""

    redis_url: str | None = None
    """An existing server (``redis://host:port/db``); None starts one in the run's folder."""
    groups_per_step: Positive = 8
    """B: groups of one learner step."""
    max_staleness: NonNegative = 1
    """η: greatest age, in steps, of the oldest token that is trained on."""
    window: Positive = 1
    """Steps within which groups may be taken out of order; 1 = strict order of ids."""
    late: Literal["drop", "wait"] = "wait"
    """What a cut does about the oldest unfinished group when it would become too stale."""
    lease_seconds: Seconds = 120.0
    """A lease that isn't renewed for so long goes to the next worker."""
    group_deadline_seconds: Seconds = 1800.0
    """Absolute cap on one lease, renewals included."""
    max_attempts: Positive = 5
    """Failed attempts after which a group is rejected and listed."""
    max_inflight: Positive = 4096
    """Greatest number of leases at a time."""
    durability: Literal["process", "power"] = "process"
    """``process`` survives any SIGKILL; ``power`` syncs every write."""
    maxmemory_mb: Positive = 2048
    """Memory of the server that is started."""


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


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    """Of Adam's moments."""
    eps: Annotated[float, Field(ge=0)] = 1e-8
    """Of Adam."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Greatest norm of the gradient; 0 = no clipping."""
    warmup_steps: NonNegative = 0
    """Linear from lr / warmup_steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, over the run's steps."""
    final_lr_share: Share = 0.1
    """Share of ``lr`` at the end of a decaying schedule."""


class RatioCheckConfig(Section):
    """The check of what was sampled: whether the log-probs that engines recorded are the learner's."""

    on_alarm: Literal["tell", "quarantine", "stop"] = "tell"
    """What an alarm does: ``tell`` says so and trains on; ``quarantine`` puts the step's groups aside
    and changes nothing, as for a loss that isn't finite; ``stop`` ends the run before the step is
    trained."""
    slack: Annotated[float, Field(gt=0)] = 1.0
    """Factor of every bound. Raise it for engines that are coarser than their dtype, such as with a
    quantization or keys in 8 bits."""


class LearnerConfig(Section):
    """The DeepSpeed learner."""

    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ranks: Positive = 1
    """Processes; they live and die as one."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage."""
    minibatches: Positive = 1
    """Optimizer steps per ledger batch; a mini-batch is whole groups."""
    micro_batch_tokens: Positive = 16384
    """Budget of padded tokens of one forward and backward."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints."""
    checkpoints_kept: Annotated[int, Field(ge=2)] = 2
    """Newest so many are kept."""
    threads: Positive = 1
    """CPU threads of one rank."""
    source: Literal["ledger", "offline"] = "ledger"
    """``offline`` trains on stored expert traces: no rollout worker is needed."""
    max_nonfinite: Positive = 3
    """Non-finite steps in a row that end the run."""
    ratio_check: RatioCheckConfig = RatioCheckConfig()
    max_idle: Positive = 20
    """Steps in a row without a token that could move the gradient (all of a shorter run) that end an
    offline run; an online one says so, and goes on."""


class WeightsConfig(Section):
    """How updated weights reach running workers."""

    transport: Literal["auto", "nccl", "shared_memory", "gloo", "snapshot"] = "auto"
    """``auto``: nccl where learner and worker have GPUs of their own, else shared memory on one
    host, else gloo; a worker that one of them fails twice is served by the next, at last by a
    snapshot."""
    topology: Literal["star", "broadcast"] = "star"
    """``star``: a channel for each worker, which fails by itself. ``broadcast``: one channel for
    all workers that are ready, so that the learner sends a version once: for many nodes."""
    snapshot_folder: str | None = None
    """Where snapshots of the weights lie, on a file system that learner and workers share; None =
    ``weights`` in the run's folder. The newest two are kept."""
    snapshot_every: NonNegative = 0
    """Steps between snapshots; 0 = only where a worker can be served in no other way."""
    every: Positive = 1
    """Steps between publications; needs ``max_staleness >= every - 1``."""
    bucket_mb: Positive = 64
    """Size of one bucket on the wire."""
    interface: str = "127.0.0.1"
    """Address that the weight channel binds; the channel itself has no credentials."""
    open_seconds: Seconds = 30.0
    """Deadline for a member to open its channel."""
    stage_seconds: Seconds = 120.0
    """Deadline for a member to hold and have checked all bytes."""
    commit_seconds: Seconds = 60.0
    """Deadline for a member to serve the new version, and again for what checks it."""
    check_bound: Annotated[float, Field(ge=0)] | None = None
    """Greatest difference, in nats, between the learner's log-probs of the check's tokens and an
    engine's that passes for rounding in a worker's first check; None = by the dtype. Later ones
    are held against those before them. An engine that rounds its weights further (fp8) needs a
    greater one; 0 = versions aren't checked."""


class EvaluateConfig(Section):
    """Evaluation on the held-out sets during a run."""

    every: NonNegative = 0
    """Steps between evaluations by a rollout worker; 0 = none in between."""
    at_start: bool = True
    """Evaluate the base model: ``accuracy_before``."""
    at_end: bool = True
    """Evaluate the trained model: ``accuracy_after``."""
    limit: Positive | None = None
    """Problems of the evaluations in between; first and last use the whole set."""
    exact: bool = False
    """The learner waits for each evaluation, so that it is of exactly that step."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 = greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus that responses are sampled from; at temperature 0 the most likely token is in any."""
    samples: Positive = 1
    """Responses a problem; accuracy is their mean (avg@k)."""


class LaunchConfig(Section):
    """Supervision."""

    max_failures: Positive = 5
    """Deaths of one process without progress in between that end the run; four SIGKILLs are one."""
    backoff_seconds: Seconds = 0.5
    """First pause before a restart; doubles up to 30 s."""
    drain_seconds: Seconds = 60.0
    """Time for the processes to drain and checkpoint after the first Ctrl-C."""
    stall_seconds: Seconds = 300.0
    """No step for so long: one line that names who waits for whom."""
    full_disk_seconds: Seconds = 600.0
    """A full disk is waited for so long; then the run drains, to go on when it is started again."""
    bind: str = "127.0.0.1"
    """Address that Redis and ZeroMQ bind."""
    gpus: Literal["none", "auto", "required"] = "auto"
    """``none``: CPUs only; ``auto``: GPUs where there is one for every rank and engine;
    ``required``: refuse a machine that has fewer."""
    share_gpu: bool = False
    """Engines get the learner's GPUs instead of GPUs of their own. Leave the learner room with
    ``rollout.vllm.gpu_memory_utilization``; weights go through the host's memory, since two ranks
    of NCCL can't share a GPU."""


class LogConfig(Section):
    """What is told and kept."""

    every: Positive = 10
    """Steps between progress lines."""
    samples_per_step: NonNegative = 2
    """Groups of every step that ``samples.jsonl`` keeps as text."""
    level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """Of the processes' log files."""
    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_on_or_off)] = "off"
    """Weights & Biases; ``online`` without an API key goes offline, to be synchronised later."""
    wandb_project: str = "tandem"
    """Project name there."""
    tensorboard: bool = False
    """TensorBoard event files in the run's folder."""


DETERMINISTIC: Mapping[str, Any] = {
    # Every group of a step is sampled by the version before it, and by no other.
    "replay.max_staleness": 0,
    "replay.window": 1,
    "weights.every": 1,
    # A sample's last bits depend on what else is in the engine's batch.
    "rollout.groups_per_batch": 1,
    "rollout.groups_ahead": 0,
    # A year: a slow worker must not change a group.
    "replay.group_deadline_seconds": 31_536_000.0,
}
"""What ``run.deterministic=true`` sets, whatever the preset says."""


class Config(Section):
    """The whole tree of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    expert: ExpertConfig = ExpertConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    launch: LaunchConfig = LaunchConfig()
    log: LogConfig = LogConfig()

    @property
    def engine_dtype(self) -> str:
        """Of the engines' weights."""
        return self.rollout.dtype or self.model.dtype

    def zero_stage(self, ranks: int | None = None) -> int:
        """The ZeRO stage that is run by so many ranks; None = those of the config.

        One float32 rank has nothing to partition, and stages 1 and 2 would only copy gradients and
        parameters to and fro (on the miniature 3 ms an update).
        """
        stage, ranks = self.learner.zero_stage, ranks or self.learner.ranks
        alone = ranks == 1 and self.model.dtype == "float32"
        return 0 if alone and stage in (1, 2) else stage

    @property
    def may_use_nccl(self) -> bool:
        """Whether NCCL may carry weights on GPUs, which learner and engine then don't share."""
        return self.weights.transport in ("auto", "nccl") and not self.launch.share_gpu

    @model_validator(mode="before")
    @classmethod
    def _deterministic(cls, tree: Any) -> Any:
        run = tree.get("run") if isinstance(tree, Mapping) else None
        if not isinstance(run, Mapping) or run.get("deterministic") is not True:
            return tree
        forced = _copy(tree)
        for key, value in DETERMINISTIC.items():
            _set(forced, key, value)
        if forced.get("rollout", {}).get("engine", "auto") == "auto":
            _set(forced, "rollout.engine", "torch")
        return forced

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Config:
        online = self.learner.source == "ledger"
        if self.run.deterministic and self.rollout.engine == "vllm":
            raise ValueError(
                "run.deterministic=true needs rollout.engine=torch: vLLM's samples depend on what "
                "else is in its batch"
            )
        if (self.run.steps is None) == (self.run.passes is None):
            raise ValueError("set exactly one of run.steps and run.passes")
        if not self.data.train:
            raise ValueError("data.train is empty: name at least one source with a path")
        if online and (self.rollout.top_p < 1.0 or self.rollout.temperature == 0):
            raise ValueError(
                "training samples from the whole distribution: rollout.top_p must be 1 and "
                "rollout.temperature above 0 (the learner's log-probs are over all tokens); "
                "evaluations have evaluate.top_p and evaluate.temperature"
            )
        if self.expert.per_group >= self.rollout.group_size:
            raise ValueError(
                f"expert.per_group={self.expert.per_group} leaves no own sample in a group of "
                f"rollout.group_size={self.rollout.group_size}"
            )
        if self.expert.prefix is not None:
            self._check_prefix()
        if self.weights.every - 1 > self.replay.max_staleness:
            raise ValueError(
                f"weights.every={self.weights.every} needs replay.max_staleness >= "
                f"{self.weights.every - 1}, and it is {self.replay.max_staleness}"
            )
        if self.launch.share_gpu and self.weights.transport == "nccl":
            raise ValueError(
                "launch.share_gpu=true puts the learner and an engine on one GPU, and two ranks "
                "of weights.transport=nccl can't share one: set weights.transport=auto"
            )
        if online and self.learner.objective.fresh_only and self.replay.max_staleness:
            raise ValueError(
                f"learner.objective.name={self.learner.objective.name} neither clips nor weights own "
                f"tokens, so it needs fresh samples: set replay.max_staleness=0, or "
                f"learner.objective.clip_low and clip_high where it has a ratio"
            )
        limit = self.replay.max_staleness + 1
        if self.replay.window > limit:
            raise ValueError(
                f"replay.window={self.replay.window} is over replay.max_staleness + 1 = {limit}"
            )
        if self.replay.groups_per_step % self.learner.minibatches:
            raise ValueError(
                f"learner.minibatches={self.learner.minibatches} doesn't divide "
                f"replay.groups_per_step={self.replay.groups_per_step}"
            )
        if not (info.context or {}).get("stored") and (refusal := why_refused(self)):
            raise ValueError(refusal)
        return self

    def _check_prefix(self) -> None:
        expert = self.expert
        if not expert.per_group or self.learner.source != "ledger":
            raise ValueError(
                f"expert.prefix={expert.prefix} has no trace to cut: it needs expert.per_group of 1 "
                f"or more and learner.source=ledger"
            )
        if expert.prefix_low > expert.prefix_high:
            raise ValueError(
                f"expert.prefix_low={expert.prefix_low} is over expert.prefix_high="
                f"{expert.prefix_high}"
            )
        timed = expert.prefix not in ("fixed", "random")
        if timed and expert.prefix_steps is None and self.run.steps is None:
            raise ValueError(
                f"expert.prefix={expert.prefix} runs over steps, and a run that is set in passes "
                f"doesn't know theirs: set expert.prefix_steps"
            )


CHANGEABLE: tuple[str, ...] = (
    "run.dir",
    "run.steps",
    "run.passes",
    "rollout.workers",
    "rollout.threads",
    "reward.pools",
    "reward.graders",
    "reward.memory_mb",
    "replay.redis_url",
    "replay.lease_seconds",
    "replay.group_deadline_seconds",
    "replay.max_inflight",
    "replay.maxmemory_mb",
    "learner.threads",
    "learner.micro_batch_tokens",
    "learner.max_idle",
    "learner.ratio_check.*",
    "learner.checkpoint_every",
    "learner.checkpoints_kept",
    "learner.optimizer.*",
    "evaluate.*",
    "launch.*",
    "log.*",
    "weights.*_seconds",
    "weights.check_bound",
)
"""Patterns of the keys that may differ when a run is resumed: schedule, logging, counts."""


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested tree as ``{"a.b.c": value}``; lists are leaves."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found.update(leaves(value, f"{name}."))
        else:
            found[name] = value
    return found


def valid_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key that an override or a preset may name."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys.extend(valid_keys(annotation, f"{prefix}{name}."))
        else:
            keys.append(f"{prefix}{name}")
    return keys


def nearest_key(key: str) -> str:
    """`` — did you mean …?`` for a mistyped key, or what the section holds."""
    keys = valid_keys()
    sections = sorted({k.rpartition(".")[0] for k in keys} - {""})
    # The right name in the wrong place (learner.lr) says more than letters that look alike.
    last = key.rpartition(".")[2]
    close = [k for k in keys if k.rpartition(".")[2] == last]
    close = [k for k in close if k.partition(".")[0] == key.partition(".")[0]] or close
    if len(close) != 1:
        close = difflib.get_close_matches(key, [*keys, *sections], n=1, cutoff=0.6) or close[:1]
    if close:
        return f" (did you mean {close[0]}?)"
    section = key.rpartition(".")[0]
    siblings = [k for k in keys if k.rpartition(".")[0] == section]
    return f" (valid there: {', '.join(siblings)})" if siblings else ""


def parse_override(text: str) -> tuple[str, Any]:
    """``a.b=c`` as key and value; the value is read as YAML."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override: write it as section.key=value")
    try:
        value = yaml.safe_load(raw) if raw.strip() else None
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} can't be read as YAML: {raw!r} ({error})") from None
    if isinstance(value, str):
        # YAML 1.1 reads 1e-4 (without a dot) as text; people mean the number.
        try:
            value = float(value)
        except ValueError:
            value = value if value is not None else raw
    return key, value


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    node: Any = tree
    for part in parts[:-1]:
        if isinstance(node, list):
            node = _item(node, part, key)
            continue
        below = node.setdefault(part, {})
        if not isinstance(below, dict | list):
            below = node[part] = {}
        node = below
    if isinstance(node, list):
        _item(node, parts[-1], key)
        node[int(parts[-1])] = value
    else:
        node[parts[-1]] = value


def _item(node: list[Any], part: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"{key}: {part!r} is not an index of a list of {len(node)}")
    return node[int(part)]


MOST_NODES = 100_000
MOST_LEVELS = 32


def build(
    tree: Mapping[str, Any], overrides: Iterable[str] = (), *, stored: bool = False
) -> Config:
    """Validates a preset's tree with overrides put over it.

    An override that names another objective than the tree takes that name's own settings
    (:func:`~tandem.common.objectives.renamed`).

    Args:
        tree: Sections of a preset.
        overrides: ``a.b=c``, later ones win.
        stored: The tree is of a run that was begun before, maybe by a version that refused less
            (:mod:`tandem.common.choices`).

    Raises:
        ConfigError: an unknown key, a wrong type or values that don't go together; the
            message names the key, the value and the nearest valid key.
    """
    merged = _copy(tree)
    given = [parse_override(text) for text in overrides]
    _rename(merged, dict(given).get("learner.objective.name"))
    for key, value in given:
        _set(merged, key, value)
    try:
        return Config.model_validate(merged, context={"stored": stored})
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _rename(tree: dict[str, Any], name: Any) -> None:
    learner = tree.get("learner")
    if name is not None and isinstance(learner, dict):
        section = learner.get("objective")
        if isinstance(section, dict):
            learner["objective"] = renamed(section, str(name))


def _copy(node: Any, counted: Iterator[int] | None = None, depth: int = 0) -> Any:
    counted = itertools.count() if counted is None else counted
    # YAML's anchors can make a small file a tree without end.
    if next(counted) > MOST_NODES or depth > MOST_LEVELS:
        raise ConfigError(
            f"a config of more than {MOST_NODES:,} values or {MOST_LEVELS} levels: do its YAML "
            f"anchors refer to themselves?"
        )
    if isinstance(node, Mapping):
        return {k: _copy(v, counted, depth + 1) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [_copy(v, counted, depth + 1) for v in node]
    return node


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        value = problem.get("input")
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown config key {key}{nearest_key(key)}")
        elif problem["type"] == "value_error" and not key:
            lines.append(str(problem.get("ctx", {}).get("error", problem["msg"])))
        else:
            lines.append(f"{key}={value!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
    return "; ".join(lines)


def read_yaml(path: Path) -> dict[str, Any]:
    """A preset file as a tree.

    Raises:
        ConfigError: it is missing, or isn't a YAML mapping.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no preset file {path}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} should hold a mapping of sections, not {type(tree).__name__}")
    return _number_strings(_copy(tree))


def _number_strings(node: Any) -> Any:
    """``lr: 5e-4`` is text in YAML 1.1; read it as the number that it is meant to be."""
    if isinstance(node, dict):
        return {k: _number_strings(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_number_strings(v) for v in node]
    if isinstance(node, str) and node[:1].isdigit() and "e" in node.lower():
        try:
            return float(node)
        except ValueError:
            return node
    return node


def read_config(text: str) -> Config:
    """The inverse of :func:`to_yaml`.

    Raises:
        ConfigError: it isn't a resolved config.
    """
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = " ".join(str(error).split())[:200]
        raise ConfigError(f"the run's config can't be read as YAML: {line}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the run's config should be a mapping, not {type(tree).__name__}")
    return build(tree, stored=True)


def to_yaml(config: Config) -> str:
    """The resolved tree, all defaults written out, as it is saved in the run's folder."""
    return yaml_text(config.model_dump(mode="json"))


def yaml_text(tree: Any, *, width: int | None = None) -> str:
    """A tree as YAML that is safe to look at and reads back as it was.

    Where it holds what can't be seen, all that isn't ASCII is written as escapes.
    """
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=width)
    if printable(text) != text:
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=width)
    return text


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ: ``{"a.b": (old, new)}``."""
    before = leaves(old.model_dump(mode="json"))
    after = leaves(new.model_dump(mode="json"))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def frozen_differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The part of :func:`differences` that a resumed run may not change."""
    return {
        key: values
        for key, values in differences(old, new).items()
        if not any(fnmatchcase(key, pattern) for pattern in CHANGEABLE)
    }
