"""DeepSpeed around the policy: updates, log-probs, checkpoints and the Hugging Face export."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.agreement import Probe
from ...common.config import Config
from ...common.seeds import keyed_seed
from ..adapters import Adapters
from ..forward.divergence import Lesson
from ..forward.policy import Policy, count_parameters, size_of
from ..forward.verification import longest_row
from ..objectives import Objective
from ..rendezvous import gather_names, sum_over_ranks
from ..resume import former
from ..resume.partitions import load_state, save_state
from ..resume.rank_state import load_rank, save_rank, set_random
from ..resume.state_files import POLICY
from ..rows.microbatch import MicroBatch
from . import loss_scale
from .critic import CriticEngine
from .loss_scale import LossScale
from .memory import PARTS, MemoryWatch, held_by
from .model_folder import entries, write_adapters, write_model
from .optimizers import Optimizer
from .update_result import Found, UpdateResult, loss_of, until_it_fits
from .zero import backward, initialise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("tandem.learner")

LOSS = "\0"
"""The loss among an objective's sums, whose names can be printed."""


class DeepSpeedEngine:
    """One rank of the learner. The process group must exist (:mod:`tandem.learner.rendezvous`).

    Args:
        model: loaded in ``config.model.dtype``; its parameters become DeepSpeed's.
        config: the run's config.
        device: this rank's device.
        critic: trained beside the policy, and kept in the same checkpoints.
        memory: made before the model was loaded; None = from here on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        device: torch.device,
        critic: CriticEngine | None = None,
        memory: MemoryWatch | None = None,
    ) -> None:
        self.memory = memory if memory is not None else MemoryWatch(device)
        """Measures this rank's memory."""
        self.config = config
        self.device = device
        self.critic = critic
        self._critic_lr = 0.0
        self._critic_applied = False
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.stage = stage_of(config, self.world_size)
        self.adapters: Adapters | None = None
        """The adapters, if only they are trained (``learner.lora``)."""
        if config.learner.lora is not None:
            self.adapters = Adapters(model, config.learner.lora, config.run.seed)
        if config.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with self.adapters.require_calls() if self.adapters else nullcontext():
            probe = Probe.of(model, longest_row(config))
        self.policy = Policy(model, self.adapters)
        self.policy.choose_kernels(probe, config.model.kernels)
        self.policy.choose_layout(probe, config.model.attention)
        self._optimizer = Optimizer(
            self.policy,
            config.learner.optimizer,
            config.model.dtype,
            self.stage,
            agree=None if critic is None else self._step_critic,
        )
        # The policy reads the output matrix itself, outside the head's own forward.
        self._engine = initialise(
            self.policy,
            self._optimizer,
            config,
            self.stage,
            device,
            outside=[self.policy.head.layer],
        )
        self._scales = [LossScale(self._engine), *([critic.scale] if critic is not None else [])]
        self._engine.train()
        # Compared through DeepSpeed, as it trains; every rank scores the same rows.
        self.policy.require_own(probe, self._scored)
        self.memory.count(self._held(), ["weights", "optimizer"])

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model."""
        return self.policy.model

    # Training.

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scalars: Mapping[str, float],
        *,
        lr: float,
        critic_lr: float = 0.0,
        critic_alone: bool = False,
        before_step: Callable[[], None] | None = None,
        inspect: Callable[[Sequence[Tensor]], bool] | None = None,
        teach: Callable[[MicroBatch], Lesson] | None = None,
    ) -> UpdateResult:
        """One optimizer step on the sum of the micro-batches' losses, and one of the critic if there is one.

        If the loss or gradient of one of the two isn't finite, neither of them changes.

        Args:
            micro_batches: this rank's micro-batches; every rank has the same number.
            objective: computes the loss.
            scalars: the objective's statistics over the whole update.
            lr: learning rate.
            critic_lr: the critic's learning rate.
            critic_alone: the policy is only scored, and stays as it is.
            before_step: called once all gradients are there, before a parameter changes.
            inspect: called then with the ``[N]`` log-probs of each of this rank's micro-batches
                (without dummies). If it returns False, no parameter changes. All ranks must agree.
            teach: called with each micro-batch, dummies included, before the policy's pass, for an objective that
                learns from a teacher.
        """
        self._critic_lr = critic_lr
        return until_it_fits(
            self._scales,
            lambda first: self._attempt(
                *(micro_batches, objective, scalars, lr, critic_alone, teach),
                # A repetition doesn't concern the caller.
                *((before_step, inspect) if first else (None, None)),
            ),
        )

    def _attempt(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scalars: Mapping[str, float],
        lr: float,
        critic_alone: bool,
        teach: Callable[[MicroBatch], Lesson] | None,
        before_step: Callable[[], None] | None,
        inspect: Callable[[Sequence[Tensor]], bool] | None,
    ) -> UpdateResult:
        self._critic_applied = False
        if self.critic is not None:
            self.critic.accumulate(micro_batches, objective, scalars)
        if critic_alone:
            found = Found.of_scores(micro_batches, self.score(micro_batches))
        else:
            found = self._accumulate(micro_batches, objective, scalars, teach)
        if before_step is not None:
            before_step()
        # Sizes stay as they are once every gradient and the optimizer's state are there.
        counts = set(self.memory.counted) != set(PARTS)
        if counts and not critic_alone:
            self.memory.count(self._held(), ["gradients"])
        refused = inspect is not None and not inspect(found.logprobs)
        if critic_alone:
            if not refused:
                self._step_critic()
            applied = self._critic_applied
        else:
            if refused:
                self._spoil(micro_batches[0])
            applied = self._optimizer.step(self._engine, lr)
            if counts and applied:
                self.memory.count(self._held(), ["weights", "optimizer"])
        if self.critic is not None and not self._critic_applied:
            applied = False
            self.critic.discard(micro_batches[0])
        names = sorted(found.sums)
        flat = torch.stack(
            [
                torch.stack(found.losses).sum().double(),
                *(found.sums[name].double() for name in names),
            ]
        )
        # A rank that has only dummies has no sums of its own.
        total = self.sum_by_name(dict(zip([LOSS, *names], flat.tolist(), strict=True)))
        return UpdateResult(
            applied=applied,
            loss=total.pop(LOSS),
            grad_norm=0.0 if critic_alone else self._optimizer.grad_norm(self._engine, applied),
            sums=total,
            logprobs=found.logprobs,
            entropies=found.entropies,
            critic=None
            if self.critic is None
            else self.critic.last_update(applied, self.sum_by_name),
            refused=refused,
            loss_scale=self._scales[0].value,
        )

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scalars: Mapping[str, float],
        teach: Callable[[MicroBatch], Lesson] | None,
    ) -> Found:
        """Forward and backward passes of the policy."""
        found = Found()
        sums = found.sums
        for micro in micro_batches:
            lesson = None if teach is None else teach(micro)
            micro = micro.to(self.device)
            scored, entropy, *divergence = self._forward(micro, objective.needs_entropy, lesson)
            if micro.dummy:
                # Of all, since ZeRO-3 counts on every rank which of the policy's outputs get a gradient.
                loss = sum((one.sum() for one in divergence), scored.sum() + entropy.sum()) * 0.0
            else:
                rows = micro.rows.with_columns(logprobs=scored, entropy=entropy)
                if divergence:
                    rows = rows.with_columns(divergence=divergence[0])
                loss, parts = loss_of(objective, rows, scalars)
                for name, value in parts.items():
                    sums[name] = sums[name] + value if name in sums else value
                found.logprobs.append(scored.detach())
                found.entropies.append(entropy.detach())
            found.losses.append(backward(self._engine, loss, self.world_size))
        return found

    def _held(self) -> list[dict[str, dict[str, int]]]:
        """What policy and critic hold now."""
        own = held_by(self.policy, self._engine.optimizer)
        return [own] if self.critic is None else [own, self.critic.held()]

    def _step_critic(self) -> bool:
        """Steps the critic, once the policy's gradient is known to be finite; returns whether it changed."""
        assert self.critic is not None
        self._critic_applied = self.critic.step(self._critic_lr)
        return self._critic_applied

    def _spoil(self, micro: MicroBatch) -> None:
        """Makes the gradient NaN, for which every ZeRO stage drops the whole step."""
        scored, _ = self._scored(micro)
        self._engine.backward(scored.sum() * math.nan, scale_wrt_gas=False)

    def sum_by_name(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks; a rank may lack names that others have."""
        if self.world_size == 1:
            return values
        names = sorted({name for names in gather_names(sorted(values)) for name in names})
        summed = sum_over_ranks([values.get(name, 0.0) for name in names])
        return dict(zip(names, summed, strict=True))

    @torch.no_grad()
    def score(
        self, micro_batches: Sequence[MicroBatch], *, base: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies of every micro-batch's tokens under the current weights.

        Collective with ZeRO-3: every rank must score as many micro-batches.

        Args:
            micro_batches: this rank's micro-batches.
            base: score with the adapters off, under the base model.
        """
        assert not base or self.adapters is not None
        self._engine.eval()
        try:
            with self.adapters.off() if base and self.adapters else nullcontext():
                return [self._scored(micro) for micro in micro_batches]
        finally:
            self._engine.train()

    def _forward(
        self, micro: MicroBatch, entropy_gradient: bool, lesson: Lesson | None = None
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._engine(
            micro.input_ids,
            micro.index,
            micro.targets,
            micro.temperature,
            entropy_gradient,
            micro.layout,
            lesson,
        )
        return found

    def _scored(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        scored, entropy = self._forward(micro.to(self.device), False)
        return scored, entropy

    # Weights out.

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of everything that is trained, as the model names it, tied ones once.

        With adapters these are their tensors, in the order of
        :func:`~tandem.common.adapters.adapter_tensors`. With ZeRO-3 each one is gathered while it is used, so
        every rank must go through all of them.
        """
        trained = self.adapters.parameters() if self.adapters else self.model.named_parameters()
        for name, parameter in trained:
            with self._gathered([parameter]):
                yield name, parameter.detach()

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All entries of the state dict that the model has without adapters, tied ones under every name.

        They come in the order of their names. With ZeRO-3 every rank must go through all of them.
        """
        state = self.model.state_dict(keep_vars=True)
        if self.adapters is not None:
            state = self.adapters.of_base(state)
        for name, tensor in sorted(state.items()):
            with self._whole(tensor) as whole:
                yield name, whole

    @contextmanager
    def _gathered(self, parameters: list[Any]) -> Iterator[None]:
        if self.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=None):
            yield

    def export_bytes(self) -> int:
        """Bytes that writing the model takes on the disk while it goes on."""
        width: int = getattr(torch, self.config.model.dtype).itemsize
        # Each tensor is on the disk twice until its file is whole.
        return 2 * width * self.parameter_count()

    @contextmanager
    def _whole(self, tensor: Tensor) -> Iterator[Tensor]:
        """A tensor of the model's, whole on every rank while it is used."""
        with self._gathered([tensor] if hasattr(tensor, "ds_id") else []):
            yield tensor.detach()

    def parameter_count(self) -> int:
        """Number of the model's parameters, without adapters; tied ones are counted once."""
        everything = count_parameters(self.model)
        return everything - self.trained_count() if self.adapters else everything

    def trained_count(self) -> int:
        """Number of parameters that are trained, and travel to the engines."""
        return sum(size_of(p) for p in self.model.parameters() if p.requires_grad)

    @property
    def sizes(self) -> dict[str, float]:
        """Where adapters are trained, figures of what is trained and of how many bytes a version has."""
        if self.adapters is None:
            return {}
        trained, whole = self.trained_count(), self.parameter_count()
        return {
            "train/parameters": float(trained),
            "weights/bytes": float(trained * getattr(torch, self.config.engine_dtype).itemsize),
            "weights/bytes_share": trained / whole,
        }

    @property
    def described(self) -> str:
        """One line on what is trained, and by how many ranks."""
        text = f"{self.parameter_count():,} parameters in {self.config.model.dtype}"
        if self.adapters is not None:
            lora, sizes = self.adapters.lora, self.sizes
            text += (
                f", all of them frozen; adapters of rank {lora.rank} on {len(self.adapters.layers)} layers are "
                f"trained ({self.trained_count():,} parameters; a version has "
                f"{sizes['weights/bytes']:,.0f} bytes, {sizes['weights/bytes_share']:.1%} of the model's)"
            )
        return f"{text} on {self.world_size} rank(s), ZeRO-{self.stage}"

    @property
    def drops(self) -> bool:
        """Whether training passes drop a part of what goes into the adapters."""
        return self.adapters is not None and self.adapters.lora.dropout > 0

    def seed_dropout(self, step: int, update: int) -> None:
        """Settles what the update's passes drop, so that a step that is trained again drops the same."""
        if self.drops:
            seed = self.config.run.seed
            torch.manual_seed(keyed_seed(seed, "dropout", step, update, self.rank))

    def barrier(self) -> None:
        """Waits until every rank has come here."""
        if self.world_size > 1:
            sum_over_ranks([0.0])

    # Checkpoints.

    def checkpoint_bytes(self) -> int:
        """Bytes of parameters and optimizer states in a checkpoint of all ranks, once a step has been made."""
        policy = self.config.learner.optimizer.saved_bytes * self.trained_count()
        return policy + (0 if self.critic is None else self.critic.checkpoint_bytes())

    def save(self, folder: Path, coefficients: Mapping[str, float] | None = None) -> None:
        """Writes this rank's parameters, optimizer and random state into an existing folder.

        Args:
            folder: the folder.
            coefficients: further numbers to keep, the same on every rank.
        """
        save_state(self._engine, self._trained(), folder / POLICY)
        if self.critic is not None:
            self.critic.save(folder)
        numbers = {**(coefficients or {}), **loss_scale.kept(self._scales)}
        save_rank(folder, self.rank, self.device, numbers)

    def load(self, folder: Path) -> dict[str, float]:
        """The inverse of :meth:`save`, whatever number of ranks wrote it at whatever ZeRO stage; returns the kept
        numbers.

        Raises:
            DataError: it can't be read, or isn't of this model.
        """
        if former.is_former(folder):
            kept = former.load_former(self._engine, folder)
            state = kept.get(f"rng_{self.rank}") or {}
            set_random({name.removesuffix("_rng"): one for name, one in state.items()}, self.device)
            coefficients = dict(kept.get("coefficients") or {})
        else:
            load_state(self._engine, self._trained(), folder / POLICY)
            coefficients = load_rank(folder, self.rank, self.device)
            loss_scale.put_back(self._scales, coefficients)
        if self.critic is not None:
            self.critic.load(folder)
        return coefficients

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        named = self.adapters.parameters() if self.adapters else self.model.named_parameters()
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def export(
        self,
        folder: Path,
        base: Path | None,
        gathering: AbstractContextManager[None] | None = None,
    ) -> None:
        """Writes the model as a plain Hugging Face folder, completely or not at all.

        To be called on one rank. With ZeRO-3 the others must go through :meth:`gather_for_export` meanwhile.

        Adapters are merged into what is written, and written by themselves beside it
        (:func:`~.model_folder.adapter_folder`).

        Args:
            folder: replaced if it exists.
            base: the folder that the model was loaded from, see :func:`~.model_folder.write_model`.
            gathering: held while parameters are gathered, and left before the files are made of them.
        """
        trained: dict[str, Tensor] = {}
        # Closed, for a write that fails would otherwise go on holding what is held.
        with closing(self._entries(trained, gathering)) as tensors:
            write_model(self.model, tensors, folder, base, self.config.model.dtype)
        if self.adapters is not None:
            write_adapters(self.adapters, trained, folder, base or Path(self.config.model.path))

    def gather_for_export(self) -> None:
        """The part of the other ranks in :meth:`export`."""
        for _ in self._entries({}):
            pass

    def _entries(
        self, trained: dict[str, Tensor], gathering: AbstractContextManager[None] | None = None
    ) -> Generator[tuple[list[str], Tensor]]:
        """See :func:`~.model_folder.entries`; fills ``trained`` with the adapters' tensors first."""
        with gathering or nullcontext():
            if self.adapters is not None:
                trained |= {name: tensor.cpu().clone() for name, tensor in self.parameters()}
            yield from entries(
                self.model, self.adapters, trained, lambda _, tensor: self._whole(tensor)
            )


def stage_of(config: Config, ranks: int) -> int:
    """The ZeRO stage that is actually run, see :meth:`Config.zero_stage`."""
    return config.zero_stage(ranks)
