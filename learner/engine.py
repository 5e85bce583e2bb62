"""DeepSpeed around the policy: updates, log-probs, checkpoints and the Hugging Face export."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.agreement import Probe
from ..common.config import Config
from ..common.errors import DataError
from ..common.seeds import keyed_seed
from .adapters import Adapters
from .critic import CriticEngine
from .forward.policy import Policy, count_parameters, size_of
from .forward.verification import longest_row
from .model_folder import adapter_folder, write_folder, write_model
from .objectives import Objective
from .optimizers import Optimizer
from .rendezvous import gather_names, sum_over_ranks
from .rows.microbatch import MicroBatch
from .update_result import Found, UpdateResult, loss_of
from .zero import backward, initialise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("tandem.learner")

TAG = "engine"
"""Name of DeepSpeed's one checkpoint in a folder."""


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
        self.adapters: Adapters | None = None
        """The adapters, if only they are trained (``learner.lora``)."""
        if config.learner.lora is not None:
            self.adapters = Adapters(model, config.learner.lora, config.run.seed)
        if config.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with self.adapters.require_calls() if self.adapters else nullcontext():
            probe = Probe.of(model, longest_row(config))
        self.policy = Policy(model, self.adapters)
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
            found = Found.of_scores(micro_batches, self.score(micro_batches))
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
    ) -> Found:
        """Forward and backward passes of the policy."""
        found = Found()
        sums = found.sums
        for micro in micro_batches:
            micro = micro.to(self.device)
            scored, entropy = self._forward(micro, objective.needs_entropy)
            if micro.dummy:
                loss = scored.sum() * 0.0
            else:
                rows = micro.rows.with_columns(logprobs=scored, entropy=entropy)
                loss, parts = loss_of(objective, rows, scalars)
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
            with self._gathered([tensor] if hasattr(tensor, "ds_id") else []):
                yield name, tensor.detach()

    @contextmanager
    def _gathered(self, parameters: list[Any], *, modify: bool = False) -> Iterator[None]:
        if self.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if modify else None):
            yield

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
            exclude_frozen_parameters=self.adapters is not None,
        )
        if self.critic is not None:
            self.critic.save(folder)

    def load(self, folder: Path) -> dict[str, float]:
        """The inverse of :meth:`save`, with the same number of ranks; returns the kept numbers.

        Raises:
            DataError: it can't be read, or was written by another number of ranks.
        """
        try:
            path, client = self._engine.load_checkpoint(
                str(folder), tag=TAG, custom_load_fn=self._load_function
            )
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
        """Loads only the parameters, whatever number of ranks wrote them; not for ZeRO stage 3, for which there
        is :meth:`join_adapters`.

        Raises:
            DataError: they can't be read.
        """
        try:
            path, _ = self._engine.load_checkpoint(
                str(folder),
                tag=TAG,
                load_module_only=True,
                load_optimizer_states=False,
                custom_load_fn=self._load_function,
            )
        except Exception as error:  # noqa: BLE001 - torch, pickle and DeepSpeed raise their own kinds
            path, why = None, " ".join(str(error).split())[:300]
        else:
            why = "it holds no DeepSpeed state"
        if path is None:
            raise DataError(f"the checkpoint {folder} can't be read: {why}")

    def join_adapters(self, folder: Path) -> None:
        """Loads only the adapters, of a checkpoint in which each rank has written a part (ZeRO stage 3).

        Raises:
            DataError: they can't be read.
        """
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        assert self.adapters is not None
        try:
            with redirect_stdout(io.StringIO()):
                state = get_fp32_state_dict_from_zero_checkpoint(
                    str(folder), tag=TAG, exclude_frozen_parameters=True
                )
            for name, parameter in self.policy.named_parameters():
                if parameter.requires_grad:
                    with self._gathered([parameter], modify=True), torch.no_grad():
                        parameter.copy_(state[name])
        except Exception as error:  # noqa: BLE001 - torch, pickle and DeepSpeed raise their own kinds
            raise DataError(
                f"the checkpoint {folder} can't be read: {' '.join(str(error).split())[:300]}"
            ) from None

    @property
    def _load_function(self) -> Callable[..., None] | None:
        return self.adapters.load if self.adapters else None

    def export(self, folder: Path, base: Path | None) -> None:
        """Writes the model as a plain Hugging Face folder, completely or not at all. Collective.

        Adapters are merged into what is written, and written by themselves beside it
        (:func:`~.model_folder.adapter_folder`).

        Args:
            folder: replaced if it exists.
            base: the folder that the model was loaded from, see :func:`~.model_folder.write_model`.
        """
        adapters = self.adapters
        trained: dict[str, Tensor] = {}
        if adapters is not None:
            trained = {name: tensor.cpu().clone() for name, tensor in self.parameters()}
        tensors = {
            name: (adapters.merged(name, tensor, trained) if adapters else tensor).cpu().clone()
            for name, tensor in self.base_tensors()
        }
        if self.rank != 0:
            return
        write_model(self.model, tensors, folder, base, self.config.model.dtype)
        if adapters is not None:
            place = self.config.model.path if base is None else str(base)
            write_folder(
                adapter_folder(folder), lambda staging: adapters.write(staging, trained, place)
            )


def stage_of(config: Config, ranks: int) -> int:
    """The ZeRO stage that is actually run, see :meth:`Config.zero_stage`."""
    return config.zero_stage(ranks)
