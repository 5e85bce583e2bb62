"""The client optimizer, which DeepSpeed partitions, and what ZeRO-0 in float32 lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..common.config import Config
from .forward.policy import Policy


class Optimizer:
    """The client optimizer, and for ZeRO-0 the gradient's norm, clipping and check.

    ZeRO-0 in float32 returns no norm and would apply a gradient that isn't finite.
    """

    def __init__(self, policy: Policy, config: Config, stage: int) -> None:
        wanted = config.learner.optimizer
        self.guards = stage == 0 and config.model.dtype == "float32"
        self.applied = True
        self.norm = float("nan")
        self._clip = wanted.grad_clip
        settings: dict[str, Any] = {
            "params": [p for p in policy.parameters() if p.requires_grad],
            "lr": wanted.lr,
            "eps": wanted.eps,
            "weight_decay": wanted.weight_decay,
        }
        kind: type[Any]
        if wanted.name == "rmsprop":
            kind = _GuardedRmsprop if self.guards else torch.optim.RMSprop
            settings["alpha"] = wanted.alpha
        else:
            kind = _GuardedAdamw if self.guards else torch.optim.AdamW
            settings |= {"betas": wanted.betas, "fused": True}
        self.optimizer: torch.optim.Optimizer = kind(**settings)
        if isinstance(self.optimizer, _Guarded):
            self.optimizer.guard = self._check

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _check(self) -> bool:
        parameters = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.norm = float(norm)
        self.applied = bool(torch.isfinite(norm))
        if self.applied and self._clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        return self.applied


class _Guarded(torch.optim.Optimizer):
    """An optimizer that asks a function before it steps."""

    guard: Callable[[], bool]

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if self.guard() else None


class _GuardedAdamw(_Guarded, torch.optim.AdamW):
    pass


class _GuardedRmsprop(_Guarded, torch.optim.RMSprop):
    pass
