"""The scale of a float16 model's loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KEPT = ("cur_scale", "cur_hysteresis", "cur_iter", "last_overflow_iter")
"""What DeepSpeed's search rests on: the last two say when the factor is raised again."""


class LossScale:
    """DeepSpeed's factor for the loss of a float16 model, which keeps small gradients above the smallest number
    of float16 (arXiv 1710.03740). DeepSpeed lowers it at a gradient that isn't finite, and raises it now and then.

    With another dtype, or with a fixed scale (``learner.deepspeed``), there is nothing to search for.

    Args:
        engine: a DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def _scaler(self) -> Any:
        # Looked up each time, since a checkpoint brings its own.
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if scaler is None or not getattr(scaler, "dynamic", False):
            return None
        # A gradient that isn't finite at any scale is the ledger's affair, and not the end of the process.
        scaler.raise_error_at_min_scale = False
        return scaler

    @property
    def value(self) -> float | None:
        """The factor; None if there is none to search for."""
        scaler = self._scaler
        return None if scaler is None else float(scaler.cur_scale)

    def state(self) -> tuple[float, int] | None:
        """What an overflow changes: the factor, and how many more overflows it tolerates."""
        scaler = self._scaler
        return None if scaler is None else (float(scaler.cur_scale), int(scaler.cur_hysteresis))

    def restore(self, state: tuple[float, int] | None) -> None:
        """The inverse of :meth:`state`."""
        scaler = self._scaler
        if scaler is not None and state is not None:
            scaler.cur_scale, scaler.cur_hysteresis = state


def kept(scales: Sequence[LossScale]) -> dict[str, float]:
    """What a checkpoint keeps of the search; empty with another dtype than float16."""
    return {
        f"loss_scale/{place}/{name}": float(getattr(scale._scaler, name))
        for place, scale in enumerate(scales)
        if scale._scaler is not None
        for name in KEPT
    }


def put_back(scales: Sequence[LossScale], numbers: Mapping[str, float]) -> None:
    """The inverse of :func:`kept`; what isn't there stays at its start."""
    for place, scale in enumerate(scales):
        for name in KEPT:
            value = numbers.get(f"loss_scale/{place}/{name}")
            if value is not None and scale._scaler is not None:
                setattr(scale._scaler, name, value if name == "cur_scale" else int(value))
