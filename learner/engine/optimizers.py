"""The client optimizer, which DeepSpeed partitions, and what ZeRO-0 in float32 lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...common.config.learner import OptimizerConfig
from ...common.errors import ConfigError

MOST = 2**31 - 2**20
"""Most elements of a tensor that ``adamw_8bit`` steps: bitsandbytes tells its GPU kernels a number in 32 bits, unchecked, and
what is beyond it would never be trained. The difference is for what ZeRO fills its tensors up with."""


class Optimizer:
    """The client optimizer, and for ZeRO-0 the gradient's norm, clipping and check.

    ZeRO-0 in float32 returns no norm and would apply a gradient that isn't finite.

    Args:
        module: its trained parameters are stepped.
        wanted: the optimizer's settings.
        dtype: dtype of the parameters.
        stage: the ZeRO stage that is run.
        agree: called once in each step, when the gradient is known to be finite and nothing has changed
            yet. If it returns False, nothing changes. None = nobody is asked.

    Raises:
        ConfigError: ``adamw_8bit`` can't step a parameter of this length.
    """

    def __init__(
        self,
        module: nn.Module,
        wanted: OptimizerConfig,
        dtype: str,
        stage: int,
        *,
        agree: Callable[[], bool] | None = None,
    ) -> None:
        self.guards = stage == 0 and dtype == "float32"
        self._finite = True
        self._norm = float("nan")
        self.clip = wanted.grad_clip
        self._agree = agree
        self._answer: bool | None = None
        self.is_ready = self.guards or stage > 0
        """Whether steps count. DeepSpeed's wrapper for half precision without ZeRO makes one without a gradient while
        it is built, which would decay the weights."""
        guarded = self.guards or agree is not None or not self.is_ready
        settings: dict[str, Any] = {
            "params": [p for p in module.parameters() if p.requires_grad],
            "lr": wanted.lr,
            "eps": wanted.eps,
            "weight_decay": wanted.weight_decay,
        }
        kind: type[Any]
        if wanted.name == "rmsprop":
            kind = _GuardedRmsprop if guarded else torch.optim.RMSprop
            settings["alpha"] = wanted.alpha
        elif wanted.name == "adamw_8bit":
            kind = _adamw_8bit(guarded)
            settings["betas"] = wanted.betas
            trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            groups = divided(trained, MOST * (dist.get_world_size() if stage else 1))
            settings["params"] = [{"params": group} for group in groups]
        else:
            kind = _GuardedAdamw if guarded else torch.optim.AdamW
            settings |= {"betas": wanted.betas, "fused": True}
        self.optimizer: torch.optim.Optimizer = kind(**settings)
        if isinstance(self.optimizer, _Guarded):
            self.optimizer.guard = self._check

    def step(self, engine: Any, lr: float) -> bool:
        """One step of the DeepSpeed engine around the module; returns whether parameters may have changed."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._answer = None
        engine.step()
        made = bool(engine.was_step_applied())
        if not made:
            _forget_sums(engine)
        finite = self._finite if self.guards else made
        return finite and self._answer is not False

    def grad_norm(self, engine: Any, applied: bool) -> float:
        """Norm of the last step's gradient before clipping; infinite if the step wasn't made."""
        if not applied:
            return float("inf")
        if self.guards:
            return self._norm
        norm = engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def _check(self) -> bool:
        if not self.is_ready or (self.guards and not self._clipped()):
            return False
        if self._agree is None:
            return True
        # ZeRO calls the optimizer once for each part of the parameters.
        if self._answer is None:
            self._answer = self._agree()
        return self._answer

    def _clipped(self) -> bool:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                # One that no row used decays all the same, as it does with several ranks.
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        norm = torch.nn.utils.get_total_norm(gradients)
        self._norm = float(norm)
        self._finite = bool(torch.isfinite(norm))
        if self._finite and self.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return self._finite


def divided(named: Sequence[tuple[str, nn.Parameter]], most: int) -> list[list[nn.Parameter]]:
    """Parameters in their order, in groups of at most ``most`` elements; ZeRO makes one tensor of each group.

    Raises:
        ConfigError: one of them alone has more.
    """
    groups: list[list[nn.Parameter]] = [[]]
    room = most
    for name, parameter in named:
        size = parameter.numel()
        if size > most:
            raise ConfigError(
                f"adamw_8bit can't step {name}: it has {size:,} elements, and bitsandbytes' kernels count at most "
                f"{most:,} on these ranks: set learner.optimizer.name=adamw, or for a critic's "
                f"learner.critic.optimizer.name=adamw"
            )
        if size > room:
            groups.append([])
            room = most
        groups[-1].append(parameter)
        room -= size
    return groups


def _forget_sums(engine: Any) -> None:
    """Drops the sums of bf16 gradients, which DeepSpeed 0.19.8 with offload keeps after a step that it skips."""
    sums = getattr(engine.optimizer, "averaged_gradients", None)
    if isinstance(sums, dict):
        sums.update(dict.fromkeys(sums))


class _Guarded(torch.optim.Optimizer):
    """An optimizer that asks a function before it steps."""

    guard: Callable[[], bool]

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if self.guard() else None


class _GuardedAdamw(_Guarded, torch.optim.AdamW):
    pass


class _GuardedRmsprop(_Guarded, torch.optim.RMSprop):
    pass


def _adamw_8bit(guarded: bool) -> type[Any]:
    """bitsandbytes' AdamW, which quantises moments in blocks of 256, so that it doesn't matter where ZeRO cuts
    parameters and joins them. It steps on CPUs too."""
    from bitsandbytes.optim import AdamW8bit

    return type("_GuardedAdamw8bit", (_Guarded, AdamW8bit), {}) if guarded else AdamW8bit
