"""DeepSpeed around the policy: updates, log-probs, checkpoints and the Hugging Face export."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
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
from .forward.policy import Policy, count_parameters, size_of
from .forward.verification import longest_row
from .losses.finite import NonFiniteError
from .model_folder import adapter_folder, write_folder, write_model
from .objectives import Objective
from .optimizers import Optimizer
from .rendezvous import gather_names, load_deepspeed, sum_over_ranks
from .rows.microbatch import MicroBatch
from .rows.rows import Rows

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


class DeepSpeedEngine:
    """One rank of the learner. The process group must exist (:mod:`tandem.learner.rendezvous`).

    Args:
        model: loaded in ``config.model.dtype``; its parameters become DeepSpeed's.
        config: the run's config.
        device: this rank's device.
    """

    def __init__(self, model: PreTrainedModel, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
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
        self._optimizer = Optimizer(self.policy, config, self.stage)
        self._engine = self._initialise()
        self._engine.train()
        # Compared through DeepSpeed, as it trains; every rank scores the same rows.
        self.policy.require_own(probe, lambda micro: self._forward(micro.to(device), False))

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model."""
        return self.policy.model

    def _initialise(self) -> Any:
        deepspeed = load_deepspeed(self.device)
        engine, _, _, _ = deepspeed.initialize(
            model=self.policy,
            optimizer=self._optimizer.optimizer,
            config=self._settings(),
            dist_init_required=False,
        )
        if self.stage == 3:
            # The policy reads the output matrix itself, outside the head's own forward, so its
            # hooks must gather it for the forward and the backward pass.
            for parameter in self.policy.head.layer.parameters():
                deepspeed.zero.register_external_parameter(self.policy, parameter)
        return engine

    def _settings(self) -> dict[str, Any]:
        learner = self.config.learner
        bf16 = self.config.model.dtype == "bfloat16"
        # Every default that affects the result is written out.
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # The caller decides where a step ends: any number of backward passes, then one step.
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0 if self._optimizer.guards else learner.optimizer.grad_clip,
            "zero_optimization": {"stage": self.stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
            "steps_per_print": None,
            "wall_clock_breakdown": False,
        }
        if bf16 and self.stage:
            # Gradients of many micro-batches are summed, and bf16 would lose the small ones.
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.stage == 3:
            settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        return settings

    # Training.

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scalars: Mapping[str, float],
        *,
        lr: float,
        before_step: Callable[[], None] | None = None,
        inspect: Callable[[Sequence[Tensor]], bool] | None = None,
    ) -> UpdateResult:
        """One optimizer step on the sum of the micro-batches' losses.

        Args:
            micro_batches: this rank's micro-batches; every rank has the same number.
            objective: computes the loss.
            scalars: the objective's statistics over the whole update.
            lr: learning rate.
            before_step: called once all gradients are there, before a parameter changes.
            inspect: called then with the ``[N]`` log-probs of each of this rank's micro-batches
                (without dummies). If it returns False, no parameter changes. All ranks must agree.
        """
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
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
                logprobs.append(scored.detach())
                entropies.append(entropy.detach())
            value = loss.detach()
            losses.append(value)
            # Data parallelism averages over ranks, but the sum is needed. The factor in brackets is 1, or
            # NaN if the loss isn't finite, so that such a loss never has a finite gradient.
            scaled = loss * (float(self.world_size) * (1 + (value - value)))
            self._engine.backward(scaled, scale_wrt_gas=False)
        if before_step is not None:
            before_step()
        if inspect is not None and not inspect(logprobs):
            self._spoil(micro_batches[0])
        self._optimizer.set_lr(lr)
        self._engine.step()
        applied = self._optimizer.applied if self._optimizer.guards else self._applied()
        names = sorted(sums)
        flat = torch.stack(
            [torch.stack(losses).sum().double(), *(sums[name].double() for name in names)]
        )
        # A rank that has only dummies has no sums of its own.
        total = self.sum_by_name(dict(zip(["loss", *names], flat.tolist(), strict=True)))
        return UpdateResult(
            applied=applied,
            loss=total.pop("loss"),
            grad_norm=self._grad_norm(applied),
            sums=total,
            logprobs=logprobs,
            entropies=entropies,
        )

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

    def _applied(self) -> bool:
        return bool(self._engine.was_step_applied())

    def _grad_norm(self, applied: bool) -> float:
        if not applied:
            return float("inf")
        if self._optimizer.guards:
            return self._optimizer.norm
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

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
