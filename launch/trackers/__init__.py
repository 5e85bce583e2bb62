"""Metrics for other tools to show: Weights & Biases and TensorBoard, each from a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...common.config import Config


def trackers_of(config: Config) -> list[str]:
    """The trackers that a run writes to. Each is an optional package, and an extra of the same name."""
    wanted = {"wandb": config.log.wandb != "off", "tensorboard": config.log.tensorboard}
    return [name for name, is_wanted in wanted.items() if is_wanted]
