"""``learner``: the DeepSpeed learner, its optimizer and its check of the sampled log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..import_path import is_import_path
from ..objectives import DEFAULT, OBJECTIVES, kind_of
from .checks.deepspeed import content_of
from .objective import AnyObjective
from .section import Below1, NonNegative, Positive, Section, Share

OPTIMIZER_KEYS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95)},
    "adamw_8bit": {"betas": (0.9, 0.95)},
    "rmsprop": {"alpha": 0.99},
}
"""Keys that not every optimizer reads, with their defaults."""


def unread_by(optimizer: str) -> dict[str, str]:
    """Those of these keys that an optimizer doesn't read, each with the name of one that does."""
    read = OPTIMIZER_KEYS.get(optimizer, {})
    others = {
        key: name for name in sorted(OPTIMIZER_KEYS, reverse=True) for key in OPTIMIZER_KEYS[name]
    }
    return {key: name for key, name in others.items() if key not in read}


SCHEDULES = ("constant", "linear", "cosine")
"""Schedules by name; any other one is named by its import path."""


def _schedule(name: str) -> str:
    if name in SCHEDULES or is_import_path(name):
        return name
    raise ValueError(f"should be {', '.join(SCHEDULES)}, or an import path package.module:function")


class OptimizerConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "adamw_8bit", "rmsprop"] = "adamw"
    """``adamw``: AdamW (arXiv 1711.05101). ``adamw_8bit``: bitsandbytes' AdamW, whose moments take a byte each
    (arXiv 2110.02861). ``rmsprop``: torch's RMSprop without momentum, whose one moment takes half the memory of
    AdamW's two."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Below1, Below1] | None = (0.9, 0.95)
    """Decay rates of AdamW's moments; null for another optimizer."""
    alpha: Below1 | None = None
    """Decay rate of RMSprop's mean of squares, 0.99 if not given; null for another optimizer."""
    eps: Annotated[float, Field(ge=0)] = 1e-8
    """Added to the root by which a gradient is divided."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay: decoupled in AdamW, added to the gradient in RMSprop."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Greatest norm of the gradient; 0 = no clipping."""
    warmup_steps: NonNegative = 0
    """Steps over which the rate rises linearly, from lr / warmup_steps."""
    warmup_share: Share | None = None
    """The same as a share of the run's steps, rounded up; set at most one of the two."""
    schedule: Annotated[str, AfterValidator(_schedule)] = "constant"
    """Course of the rate after warm-up, over the run's steps: ``constant``, ``linear``, ``cosine``, or a
    function of your own by its import path (``docs/hooks.md``)."""
    final_lr_share: Share = 0.1
    """Share of ``lr`` at the end of a decaying schedule."""

    @property
    def saved_bytes(self) -> int:
        """Bytes of a trained parameter in a checkpoint: its float32 master and the moments, which ``adamw_8bit`` has
        there in float64."""
        return {"adamw": 12, "adamw_8bit": 20, "rmsprop": 8}[self.name]

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, given: Any) -> Any:
        """Fills in the keys of the optimizer that is named."""
        if not isinstance(given, Mapping):
            return given
        present = {key: value for key, value in given.items() if value is not None}
        null = dict.fromkeys(key for keys in OPTIMIZER_KEYS.values() for key in keys)
        return {**null, **OPTIMIZER_KEYS.get(str(given.get("name", "adamw")), {}), **present}

    @model_validator(mode="after")
    def _goes_together(self) -> OptimizerConfig:
        for key, name in unread_by(self.name).items():
            value = getattr(self, key)
            if value is not None:
                raise ValueError(
                    f"{key}={value} is {name}'s, and name={self.name} doesn't read it: leave it "
                    f"out, or set name={name}"
                )
        if self.warmup_steps and self.warmup_share is not None:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_share={self.warmup_share:g} both set the "
                f"warm-up: leave one out (warmup_steps=0, or warmup_share=null)"
            )
        return self


class CriticOptimizerConfig(OptimizerConfig):
    """The critic's optimizer and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate; verl's default."""


class CriticConfig(Section):
    """The critic of an objective that needs values (``ppo``): a model of its own with one value per token."""

    model: str | None = None
    """The model that its body begins as, a folder or hub name with the policy's tokenizer; null = the run's
    base model. The value head begins at 0."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    warmup_steps: NonNegative = 0
    """First steps of the run in which only the critic is trained, and the policy stays as it is."""


class RatioCheckConfig(Section):
    """The check that the log-probs recorded by engines are the learner's."""

    on_alarm: Literal["tell", "quarantine", "stop"] = "tell"
    """What an alarm does: ``tell`` says so and trains on; ``quarantine`` sets the step's groups aside
    and changes nothing, as for a loss that isn't finite; ``stop`` ends the run before the step is
    trained."""
    slack: Annotated[float, Field(gt=0)] = 1.0
    """Factor of every bound. Raise it for engines that are less exact than their dtype, such as with
    quantization or an 8-bit cache."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the base model stays as it is, and only these are trained,
    kept in checkpoints and sent to the engines."""

    rank: Annotated[int, Field(gt=0, le=512)] = 16
    """Rank of the update of each layer's weight."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / √rank instead (arXiv 2312.03732)."""
    dropout: Below1 = 0.0
    """Share of an adapter's inputs that is dropped in training passes; log-probs are scored without."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get an adapter, such as ``q_proj``; ``all-linear``: every one but the
    output head."""


class LearnerConfig(Section):
    """The DeepSpeed learner."""

    objective: AnyObjective = OBJECTIVES[DEFAULT]()
    """The loss. What each name reads and sets: ``docs/objectives.md``."""
    optimizer: OptimizerConfig = OptimizerConfig()
    ranks: Positive = 1
    """Number of processes; they live and die together."""
    hosts: Positive = 1
    """Number of hosts over which the ranks are spread evenly, in their order; the first is the head, on which
    ``tandem start`` runs, and the others join by ``tandem join FILE --role learner``."""
    checkpoints: Literal["auto", "shared", "gathered"] = "auto"
    """How ranks on other hosts keep their part of a checkpoint. ``shared``: they write into the run's folder,
    which all hosts have under the same path; ``gathered``: rank 0 writes it for them, and sends it to them when
    a run resumes; ``auto``: whichever a look at the folder from every host allows."""
    critic: CriticConfig | None = None
    """The critic; null for an objective without one. An objective that needs one gets the defaults."""
    teacher: str | None = None
    """The teacher of an objective that learns from one (``distill``): a folder or hub name, with the policy's
    tokenizer; it is loaded in ``model.dtype``, whole on every rank."""
    lora: LoraConfig | None = None
    """Adapters in place of full training; null = every parameter is trained."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lies in host memory in place of a GPU's (``docs/memory.md``): ``optimizer``: the optimizer's states and
    ZeRO's float32 weights, which are stepped there, with ZeRO-1, 2 and 3; ``parameters``: the weights of the
    forward pass too, with ZeRO-3."""
    minibatches: Positive = 1
    """Optimizer steps per ledger batch and pass; a mini-batch is whole groups."""
    update_epochs: Positive = 1
    """Passes over each ledger batch. The first takes the groups in their order, each further one in an order
    of its own; advantages and log-probs of the step's start are the same for all."""
    stop_kl: Annotated[float, Field(gt=0)] | None = None
    """Greatest mean KL, in nats per own token, from the policy at the step's start: an update that begins
    beyond it is left out, and so are the step's others after it. Estimated by k3, as in the usual code of
    PPO; null = no bound."""
    deepspeed: Annotated[dict[str, Any] | None, BeforeValidator(content_of)] = None
    """Settings of DeepSpeed's own, laid over the learner's: a JSON file, whose content the run keeps, or the
    settings themselves (``docs/memory.md``)."""
    micro_batch_tokens: Positive = 16384
    """Budget of tokens for one forward and backward pass, padding included."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints."""
    checkpoints_kept: Annotated[int, Field(ge=2)] = 2
    """Number of newest checkpoints that are kept."""
    threads: Positive | None = None
    """CPU threads of one rank. null = on a CPU, or with ``offload``, an equal share of the host's cores for each of its
    ranks, up to 8, without those of the workers that sample meanwhile: strictly on-policy
    (``replay.max_staleness=0``) and offline there are none. On a GPU without offload, and with ``run.deterministic``, 1."""
    source: Literal["ledger", "offline"] = "ledger"
    """``offline`` trains on stored expert traces, without rollout workers."""
    train: bool = True
    """Whether anything is trained; false = the policy only samples, and ``log.archive`` keeps the groups."""
    max_nonfinite: Positive = 3
    """Number of non-finite steps in a row that end the run."""
    ratio_check: RatioCheckConfig = RatioCheckConfig()
    max_idle: Positive = 20
    """Number of steps in a row (or all of a shorter run) without a token that could move the gradient,
    after which an offline run ends; an online run says so, and goes on."""

    @model_validator(mode="before")
    @classmethod
    def _own_critic(cls, given: Any) -> Any:
        """Gives an objective that needs a critic the default one."""
        if not isinstance(given, Mapping) or given.get("critic") is not None:
            return given
        wanted = given.get("objective")
        name = wanted.get("name", DEFAULT) if isinstance(wanted, Mapping) else None
        needs = kind_of(str(name)).needs if name else getattr(wanted, "needs", ())
        return {**given, "critic": {}} if "values" in needs else given
