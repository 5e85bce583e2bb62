"""A critic on a backbone of its own: its values, updates and part of a checkpoint, under DeepSpeed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.agreement import Probe
from ...common.config import Config
from ...common.errors import ConfigError, DataError
from ...common.models import load_model
from ..forward.policy import Policy, size_of
from ..forward.value import ValueModel
from ..forward.verification import longest_row
from ..losses.finite import NonFiniteError
from ..objectives import Objective, Ppo
from ..resume.partitions import load_state, save_state
from ..resume.state_files import CRITIC
from ..rows.microbatch import MicroBatch, laid_out
from .loss_scale import LossScale
from .memory import held_by
from .optimizers import Optimizer
from .zero import backward, initialise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("tandem.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdate:
    """The critic's part of an update."""

    loss: float
    """The critic's loss over all ranks, coefficient included."""
    grad_norm: float
    """Norm of its gradient before clipping, over all ranks; infinite if the update wasn't made."""
    sums: dict[str, float]
    """Sums of the objective's value loss over all ranks."""


class CriticEngine:
    """One rank of the critic. The process group must exist.

    Args:
        model: the language model that it begins as, loaded in ``config.model.dtype``.
        config: the run's config, with ``learner.critic``.
        device: this rank's device.
    """

    def __init__(self, model: PreTrainedModel, config: Config, device: torch.device) -> None:
        settings = config.learner.critic
        assert settings is not None
        self.device = device
        self.world_size = dist.get_world_size()
        self.stage = config.zero_stage(self.world_size)
        if config.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(model)
        # Whether its attention can do it is tested by its log-probs, while it has them.
        probe = Probe.of(model, longest_row(config))
        policy.choose_kernels(probe, config.model.kernels, whose="the critic's")
        self.layout = policy.choose_layout(probe, config.model.attention, whose="the critic's")
        policy.require_own(probe, whose="the critic's")
        self.model = ValueModel(policy)
        self._optimizer = Optimizer(self.model, settings.optimizer, config.model.dtype, self.stage)
        self._engine = initialise(self.model, self._optimizer, config, self.stage, device)
        self._saved_bytes = settings.optimizer.saved_bytes
        self.scale = LossScale(self._engine)
        """The scale of its loss."""
        self._engine.train()
        self._pending = False
        self._losses: list[Tensor] = []
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """``[N]`` float32 values before every token of every micro-batch, under the current weights."""
        self._engine.eval()
        try:
            return [self._forward(micro) for micro in micro_batches]
        finally:
            self._engine.train()

    def _forward(self, micro: MicroBatch) -> Tensor:
        micro = laid_out(micro, self.layout).to(self.device)
        values: Tensor = self._engine(micro.input_ids, micro.index, micro.layout)
        return values

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scalars: Mapping[str, float],
    ) -> None:
        """Forward and backward passes of an update; :meth:`step` or :meth:`discard` must follow."""
        assert isinstance(objective, Ppo)
        self._losses, self._sums, self._pending = [], {}, True
        sums = self._sums
        for micro in micro_batches:
            values = self._forward(micro)
            if micro.dummy:
                loss = values.sum() * 0.0
            else:
                rows = micro.to(self.device).rows.with_columns(values=values)
                try:
                    loss, parts = objective.value_loss(rows, scalars)
                except NonFiniteError as error:
                    log.warning(f"no loss of the critic: {error}")
                    loss, parts = values.sum() * math.nan, {}
                for name, value in parts.items():
                    sums[name] = sums[name] + value if name in sums else value
            self._losses.append(backward(self._engine, loss, self.world_size))

    def step(self, lr: float) -> bool:
        """Steps on the gradient that was accumulated; returns False, and changes nothing, if it isn't finite."""
        self._pending = False
        return self._optimizer.step(self._engine, lr)

    def discard(self, micro: MicroBatch) -> None:
        """Drops the gradient that was accumulated, if it wasn't stepped on.

        Args:
            micro: any of this rank's micro-batches.
        """
        if not self._pending:
            return
        # A gradient of NaN, for which every ZeRO stage drops the whole step.
        before = self.scale.state()
        backward(self._engine, self._forward(micro).sum() * math.nan, self.world_size)
        self.step(0.0)
        self.scale.restore(before)

    def last_update(
        self, applied: bool, sum_by_name: Callable[[dict[str, float]], dict[str, float]]
    ) -> CriticUpdate:
        """The figures of the last update."""
        found = {name: float(value) for name, value in self._sums.items()}
        sums = sum_by_name({"loss": float(torch.stack(self._losses).sum()), **found})
        return CriticUpdate(
            loss=sums.pop("loss"),
            grad_norm=self._optimizer.grad_norm(self._engine, applied),
            sums=sums,
        )

    def held(self) -> dict[str, dict[str, int]]:
        """What the critic holds now, see :func:`~.memory.held_by`."""
        return held_by(self.model, self._engine.optimizer)

    def checkpoint_bytes(self) -> int:
        """Bytes of its parameters and optimizer states in a checkpoint of all ranks."""
        return self._saved_bytes * sum(size_of(p) for p in self.model.parameters())

    def save(self, folder: Path) -> None:
        """Writes this rank's parameters and optimizer into an existing folder."""
        save_state(self._engine, list(self.model.named_parameters()), folder / CRITIC)

    def load(self, folder: Path) -> None:
        """The inverse of :meth:`save`, whatever number of ranks wrote it at whatever ZeRO stage.

        Raises:
            DataError: it can't be read, or the checkpoint has no critic.
        """
        if not (folder / CRITIC).is_dir():
            raise DataError(f"the checkpoint {folder} holds no critic")
        load_state(self._engine, list(self.model.named_parameters()), folder / CRITIC)


def load_critic(config: Config, device: torch.device, vocabulary: int) -> CriticEngine | None:
    """The critic that a config asks for, as it is at the start of a run; None if it asks for none.

    Args:
        config: the run's config.
        device: this rank's device.
        vocabulary: number of token ids that the policy knows.

    Raises:
        ConfigError: its model knows fewer token ids than the policy.
    """
    settings = config.learner.critic
    if settings is None:
        return None
    path = settings.model or config.model.path
    model = load_model(
        path,
        dtype=config.model.dtype,
        attention=config.model.attention,
        device=device,
        key="model.path" if settings.model is None else "learner.critic.model",
    )
    known = model.config.get_text_config().vocab_size
    if known < vocabulary:
        raise ConfigError(
            f"learner.critic.model={path} knows {known:,} token ids and the policy {vocabulary:,}: name "
            f"a model with the policy's tokenizer, or null for the base model"
        )
    return CriticEngine(model, config, device)
