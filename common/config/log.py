"""``log``: what is told and kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from .section import NonNegative, Positive, Section


def _on_or_off(value: Any) -> Any:
    """YAML reads a bare ``off`` as false and ``on`` as true."""
    return {True: "online", False: "off"}[value] if isinstance(value, bool) else value


class LogConfig(Section):
    """What is told and kept."""

    every: Positive = 10
    """Steps between progress lines."""
    samples_per_step: NonNegative = 2
    """Groups of every step that ``samples.jsonl`` keeps as text."""
    level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """Of the processes' log files."""
    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_on_or_off)] = "off"
    """Weights & Biases; ``online`` without an API key goes offline, to be synchronised later."""
    wandb_project: str = "tandem"
    """Project name there."""
    tensorboard: bool = False
    """TensorBoard event files in the run's folder."""
