"""``log``: what is reported and kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from .section import NonNegative, Positive, Section


def _on_or_off(value: Any) -> Any:
    """Undoes YAML's reading of a bare ``off`` as false and ``on`` as true."""
    return {True: "online", False: "off"}[value] if isinstance(value, bool) else value


class LogConfig(Section):
    """What is reported and kept."""

    every: Positive = 10
    """Steps from one progress line to the next."""
    samples_per_step: NonNegative = 2
    """Number of groups of every step that ``samples.jsonl`` keeps as text."""
    archive: bool = False
    """Whether every group is kept as it was trained on, in ``archive/``; see ``tandem archive``."""
    inspect: bool = False
    """Whether what ``samples.jsonl`` keeps is written as logs for Inspect's viewer too, in ``inspect/``, a log for every
    20 steps; see ``tandem view``."""
    level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """Level of the processes' log files."""
    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_on_or_off)] = "off"
    """Weights & Biases; without an API key, ``online`` works offline, to be synchronised later."""
    wandb_project: str = "tandem"
    """Project in Weights & Biases."""
    tensorboard: bool = False
    """Whether TensorBoard event files are written into the run's folder."""
