"""``learner``: the DeepSpeed learner, its optimizer and its check of the sampled log-probs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..objectives import DEFAULT, OBJECTIVES
from .objective import AnyObjective
from .section import Below1, NonNegative, Positive, Section, Share


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    eps: Annotated[float, Field(ge=0)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Greatest norm of the gradient; 0 = no clipping."""
    warmup_steps: NonNegative = 0
    """Steps over which the rate rises linearly, from lr / warmup_steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the rate after warm-up, over the run's steps."""
    final_lr_share: Share = 0.1
    """Share of ``lr`` at the end of a decaying schedule."""


class RatioCheckConfig(Section):
    """The check that the log-probs recorded by engines are the learner's."""

    on_alarm: Literal["tell", "quarantine", "stop"] = "tell"
    """What an alarm does: ``tell`` says so and trains on; ``quarantine`` sets the step's groups aside
    and changes nothing, as for a loss that isn't finite; ``stop`` ends the run before the step is
    trained."""
    slack: Annotated[float, Field(gt=0)] = 1.0
    """Factor of every bound. Raise it for engines that are less exact than their dtype, such as with
    quantization or an 8-bit cache."""


class LearnerConfig(Section):
    """The DeepSpeed learner."""

    objective: AnyObjective = OBJECTIVES[DEFAULT]()
    """The loss. What each name reads and sets: ``docs/objectives.md``."""
    optimizer: OptimizerConfig = OptimizerConfig()
    ranks: Positive = 1
    """Number of processes; they live and die together."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage."""
    minibatches: Positive = 1
    """Optimizer steps per ledger batch; a mini-batch is whole groups."""
    micro_batch_tokens: Positive = 16384
    """Budget of padded tokens for one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints."""
    checkpoints_kept: Annotated[int, Field(ge=2)] = 2
    """Number of newest checkpoints that are kept."""
    threads: Positive = 1
    """CPU threads of one rank."""
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
