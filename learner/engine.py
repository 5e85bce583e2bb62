"""DeepSpeed around the policy: updates, log-probs, checkpoints and the Hugging Face export."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.agreement import Probe
from ..common.config import Config
from ..common.errors import DataError
from ..common.run_folder import replace_folder, sync_tree
from .critic import CriticEngine, CriticUpdate
from .forward.policy import Policy, count_parameters
from .forward.verification import longest_row
from .losses.finite import NonFiniteError
from .objectives import Objective
from .optimizers import Optimizer
from .rendezvous import gather_names, sum_over_ranks
from .rows.microbatch import MicroBatch
from .rows.rows import Rows
from .zero import backward, initialise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("tandem.learner")

TAG = "engine"
"""Name of DeepSpeed's one checkpoint in a folder."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateResult:
    """The result of one update."""

    applied: bool
    """False if the loss or gradient wasn't finite; then no parameter has changed."""
    loss: float
    """Loss over all ranks."""
    grad_norm: float
    """Norm of the gradient before clipping, over all ranks; infinite if it wasn't finite."""
    sums: dict[str, float]
    """The objective's sums over all ranks."""
    logprobs: list[Tensor]
    """``[N]`` log-probs of each micro-batch of this rank, detached."""
    entropies: list[Tensor]
    """``[N]`` entropies of each micro-batch of this rank, detached."""
    critic: CriticUpdate | None = None
    """The critic's part; None without a critic."""


@dataclass(slots=True)
class _Found:
    """What this rank's passes over an update's micro-batches gave, without dummies but for the losses."""

    losses: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)

    @classmethod
    def of_scores(
        cls, micro_batches: Sequence[MicroBatch], scores: Sequence[tuple[Tensor, Tensor]]
    ) -> _Found:
        """Of passes without a loss."""
        kept = [one for micro, one in zip(micro_batches, scores, strict=True) if not micro.dummy]
        return cls(
            losses=[torch.zeros(())],
            logprobs=[logprobs for logprobs, _ in kept],
            entropies=[entropy for _, entropy in kept],
        )


class DeepSpeedEngine:
    """One rank of the learner. The process group must exist (:mod:`tandem.learner.rendezvous`).

    Args:
        model: loaded in ``config.model.dtype``; its parameters become DeepSpeed's.
        config: the run's config.
        device: this rank's device.
        critic: trained beside the policy, and kept in the same checkpoints.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        device: torch.device,
        critic: CriticEngine | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.critic = critic
        self._critic_lr = 0.0
        self._critic_applied = False
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.stage = stage_of(config, self.world_size)
        if config.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        probe = Probe.of(model, longest_row(config))
        self.policy = Policy(model)
        self.policy.share_prompts(probe)
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
        self._engine.train()
        # Compared through DeepSpeed, as it trains; every rank scores the same rows.
        self.policy.require_own(probe, lambda micro: self._forward(micro.to(device), False))

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
        """
        self._critic_lr, self._critic_applied = critic_lr, False
        if self.critic is not None:
            self.critic.accumulate(micro_batches, objective, scalars)
        if critic_alone:
            found = _Found.of_scores(micro_batches, self.score(micro_batches))
        else:
            found = self._accumulate(micro_batches, objective, scalars)
        if before_step is not None:
            before_step()
        refused = inspect is not None and not inspect(found.logprobs)
        if critic_alone:
            if not refused:
                self._step_critic()
            applied = self._critic_applied
        else:
            if refused:
                self._spoil(micro_batches[0])
            applied = self._optimizer.step(self._engine, lr)
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
        total = self.sum_by_name(dict(zip(["loss", *names], flat.tolist(), strict=True)))
        return UpdateResult(
            applied=applied,
            loss=total.pop("loss"),
            grad_norm=0.0 if critic_alone else self._optimizer.grad_norm(self._engine, applied),
            sums=total,
            logprobs=found.logprobs,
            entropies=found.entropies,
            critic=None if self.critic is None else self.critic.told(applied, self.sum_by_name),
        )

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scalars: Mapping[str, float],
    ) -> _Found:
        """Forward and backward passes of the policy."""
        found = _Found()
        sums = found.sums
        for micro in micro_batches:
            micro = micro.to(self.device)
            scored, entropy = self._forward(micro, objective.needs_entropy)
            if micro.dummy:
                loss = scored.sum() * 0.0
            else:
                rows = micro.rows.with_columns(logprobs=scored, entropy=entropy)
                loss, parts = _loss(objective, rows, scalars)
                for name, value in parts.items():
                    sums[name] = sums[name] + value if name in sums else value
                found.logprobs.append(scored.detach())
                found.entropies.append(entropy.detach())
            found.losses.append(backward(self._engine, loss, self.world_size))
        return found

    def _step_critic(self) -> bool:
        """Steps the critic, once the policy's gradient is known to be finite; returns whether it changed."""
        assert self.critic is not None
        self._critic_applied = self.critic.step(self._critic_lr)
        return self._critic_applied

    def _spoil(self, micro: MicroBatch) -> None:
        """Makes the gradient NaN, for which every ZeRO stage drops the whole step."""
        scored, _ = self._forward(micro.to(self.device), False)
        self._engine.backward(scored.sum() * math.nan, scale_wrt_gas=False)

    def sum_by_name(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks; a rank may lack names that others have."""
        if self.world_size == 1:
            return values
        names = sorted({name for names in gather_names(sorted(values)) for name in names})
        summed = sum_over_ranks([values.get(name, 0.0) for name in names])
        return dict(zip(names, summed, strict=True))

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies of every micro-batch's tokens under the current weights."""
        self._engine.eval()
        try:
            return [self._forward(micro.to(self.device), False) for micro in micro_batches]
        finally:
            self._engine.train()

    def _forward(self, micro: MicroBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        scored, entropy = self._engine(
            micro.input_ids,
            micro.index,
            micro.targets,
            micro.temperature,
            entropy_gradient,
            micro.layout,
        )
        return scored, entropy

    # Weights out.

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every parameter as the model names them, tied ones once.

        With ZeRO-3 each one is gathered while it is used, so every rank must go through all of them.
        """
        for name, parameter in self.model.named_parameters():
            with self._gathered([parameter]):
                yield name, parameter.detach()

    @contextmanager
    def _gathered(self, parameters: list[Any]) -> Iterator[None]:
        if self.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=None):
            yield

    def parameter_count(self) -> int:
        """Number of parameters, tied ones counted once."""
        if self.stage < 3:
            return count_parameters(self.model)
        return sum(p.ds_numel for p in self.model.parameters())

    def barrier(self) -> None:
        """Waits until every rank has come here."""
        if self.world_size > 1:
            sum_over_ranks([0.0])

    # Checkpoints.

    def save(self, folder: Path, coefficients: Mapping[str, float] | None = None) -> None:
        """Writes parameters, optimizer and random states of all ranks into an existing folder.

        Args:
            folder: the folder.
            coefficients: further numbers to keep, the same on every rank.
        """
        state = {"torch_rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        self._engine.save_checkpoint(
            str(folder),
            tag=TAG,
            client_state={
                f"rng_{self.rank}": state,
                "coefficients": dict(coefficients or {}),
            },
            save_latest=False,
        )
        if self.critic is not None:
            self.critic.save(folder)

    def load(self, folder: Path) -> dict[str, float]:
        """The inverse of :meth:`save`, with the same number of ranks; returns the kept numbers.

        Raises:
            DataError: it can't be read, or was written by another number of ranks.
        """
        try:
            path, client = self._engine.load_checkpoint(str(folder), tag=TAG)
        except Exception as error:  # noqa: BLE001 - torch, pickle and DeepSpeed raise their own kinds
            raise DataError(
                f"the checkpoint {folder} can't be read: {' '.join(str(error).split())[:300]}"
            ) from None
        if path is None:
            raise DataError(f"the checkpoint {folder} holds no DeepSpeed state")
        if self.critic is not None:
            self.critic.load(folder)
        state = client.get(f"rng_{self.rank}") or client.get("rng_0")
        if state is not None:
            torch.set_rng_state(state["torch_rng"])
            if "cuda_rng" in state and self.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        return dict(client.get("coefficients") or {})

    def load_weights(self, folder: Path) -> None:
        """Loads only the parameters, whatever number of ranks wrote them; not for ZeRO stage 3.

        Raises:
            DataError: they can't be read.
        """
        try:
            path, _ = self._engine.load_checkpoint(
                str(folder), tag=TAG, load_module_only=True, load_optimizer_states=False
            )
        except Exception as error:  # noqa: BLE001 - torch, pickle and DeepSpeed raise their own kinds
            path, why = None, " ".join(str(error).split())[:300]
        else:
            why = "it holds no DeepSpeed state"
        if path is None:
            raise DataError(f"the checkpoint {folder} can't be read: {why}")

    def export(self, folder: Path, base: Path | None) -> None:
        """Writes the model as a plain Hugging Face folder, completely or not at all. Collective.

        Args:
            folder: replaced if it exists.
            base: the folder that the model was loaded from. Its tokenizer and config files are
                copied byte for byte, so that whatever reads the base reads the result.
        """
        tensors = {name: tensor.cpu().clone() for name, tensor in self._exported()}
        if self.rank != 0:
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            self.model.save_pretrained(staging, state_dict=tensors)
            if base is not None and base.is_dir():
                _copy_side_files(base, staging, self.config.model.dtype)
            for path in staging.iterdir():
                path.chmod(0o644)
            staging.chmod(0o755)
            sync_tree(staging)
            replace_folder(staging, folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        """All entries of the state dict, tied ones under every name."""
        if self.stage < 3:
            yield from self.model.state_dict().items()
        else:
            yield from self.parameters()


def _loss(
    objective: Objective, rows: Rows, scalars: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective's loss; NaN if it refuses the log-probs, so that every rank reaches the step, which
    none of them makes."""
    try:
        return objective.loss(rows, scalars)
    except NonFiniteError as error:
        log.warning(f"no loss: {error}")
        assert rows.logprobs is not None
        return rows.logprobs.sum() * math.nan, {}


def stage_of(config: Config, ranks: int) -> int:
    """The ZeRO stage that is actually run, see :meth:`Config.zero_stage`."""
    return config.zero_stage(ranks)


def _copy_side_files(base: Path, staging: Path, dtype: str) -> None:
    weights = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
    for path in sorted(base.iterdir()):
        heavy = path.suffix in weights or path.name.endswith(".index.json")
        if path.is_file() and not heavy:
            shutil.copyfile(path, staging / path.name)
    config = staging / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = dtype
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
