"""What a checkpoint keeps of each rank beside parameters and optimizer: its random state, and a few numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...common.errors import DataError
from ...common.plain import one_line

NUMBERS = "numbers"
"""Key of the file's metadata."""


def save_rank(folder: Path, rank: int, device: torch.device, numbers: Mapping[str, float]) -> None:
    """Writes the random state of this process, and numbers that are the same on every rank."""
    state = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    save_file(state, _path(folder, rank), metadata={NUMBERS: json.dumps(dict(numbers))})


def load_rank(folder: Path, rank: int, device: torch.device) -> dict[str, float]:
    """The inverse of :func:`save_rank`; returns the numbers.

    A rank that the checkpoint doesn't know, since more of them go on than wrote it, keeps its random state.

    Raises:
        DataError: it can't be read.
    """
    known = _path(folder, rank).exists()
    path = _path(folder, rank if known else 0)
    try:
        with safe_open(path, framework="pt") as file:
            numbers: dict[str, float] = json.loads(file.metadata()[NUMBERS])
            if known:
                set_random({key: file.get_tensor(key) for key in file.keys()}, device)  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"{path} can't be read: {one_line(error, 300)}") from None
    return numbers


def set_random(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the random state of this process: ``torch``, and on a GPU ``cuda``."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"
