"""The ways by which a version reaches a worker: which there are, and the choice between them.

A way is either a channel, which both ends enter at the same time, or a place that both ends see. Each
is in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import WeightsError
from . import nccl, shared_memory, snapshot
from .gloo import Channel, Gloo
from .manifest import WeightManifest
from .nccl import Nccl
from .protocol import Pair
from .shared_memory import Memory, StagedTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way; it has a channel or a ``fetch``."""

    obstacle: Callable[[Pair], str] = lambda pair: ""
    """Why a pair can't use it, and what to do instead; empty if it can."""
    channel: type[Channel] | None = None
    """Carries the bytes from the learner's buffer into the worker's own."""
    fetch: Callable[[WeightManifest, str, Memory], StagedTensors] | None = None
    """Gets the bytes from the place that the learner's offer names, or raises ``WeightsError``. Whatever
    it returns is checked by whoever called."""


WAYS: dict[str, Way] = {
    "nccl": Way(obstacle=nccl.obstacle, channel=Nccl),
    "shared_memory": Way(obstacle=shared_memory.obstacle, fetch=shared_memory.fetch),
    "gloo": Way(channel=Gloo),
    "snapshot": Way(fetch=snapshot.fetch),
}
"""All ways by their names in ``weights.transport``, in the order in which ``auto`` tries them."""


def possible_ways(setting: str, pair: Pair) -> tuple[str, ...]:
    """The ways that a learner and a worker can use, best first.

    Args:
        setting: ``weights.transport``.

    Raises:
        WeightsError: they can't use the way that is set.

    >>> possible_ways("auto", Pair(learner="cuda:a", worker="cuda:b", same_memory=False))
    ('nccl', 'gloo', 'snapshot')
    """
    if setting == "auto":
        return tuple(name for name, way in WAYS.items() if not way.obstacle(pair))
    obstacle = WAYS[setting].obstacle(pair)
    if obstacle:
        raise WeightsError(f"weights.transport={setting} {obstacle}")
    return (setting,)


def device_name(device: torch.device) -> str:
    """``cuda:<uuid>``, which tells GPUs apart across processes; ``cpu`` if NCCL can't use the device."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return "cpu"
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
