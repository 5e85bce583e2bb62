"""The client optimizer, which DeepSpeed partitions, and what ZeRO-0 in float32 lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.config.learner import OptimizerConfig


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
        guarded = self.guards or agree is not None
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
        else:
            kind = _GuardedAdamw if guarded else torch.optim.AdamW
            settings |= {"betas": wanted.betas, "fused": True}
        self.optimizer: torch.optim.Optimizer = kind(**settings)
        if isinstance(self.optimizer, _Guarded):
            self.optimizer.guard = self._check

    @property
    def asked(self) -> bool:
        """Whether ``agree`` was called in the last step."""
        return self._answer is not None

    def step(self, engine: Any, lr: float) -> bool:
        """One step of the DeepSpeed engine around the module; returns whether parameters may have changed."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._answer = None
        engine.step()
        finite = self._finite if self.guards else bool(engine.was_step_applied())
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
        if self.guards and not self._clipped():
            return False
        if self._agree is None:
            return True
        # ZeRO calls the optimizer once for each part of the parameters.
        if self._answer is None:
            self._answer = self._agree()
        return self._answer

    def _clipped(self) -> bool:
        parameters = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._norm = float(norm)
        self._finite = bool(torch.isfinite(norm))
        if self._finite and self.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return self._finite


class _Guarded(torch.optim.Optimizer):
    """An optimizer that asks a function before it steps."""

    guard: Callable[[], bool]

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if self.guard() else None


class _GuardedAdamw(_Guarded, torch.optim.AdamW):
    pass


class _GuardedRmsprop(_Guarded, torch.optim.RMSprop):
    pass
