"""The ways by which weights can reach a worker, and the choice between them."""

from __future__ import annotations

import torch

from ..errors import WeightsError
from .channel import Pair, Way
from .gloo import Gloo
from .nccl import Nccl
from .shared_memory import SharedMemory
from .snapshot import Snapshot

WAYS: dict[str, type[Way]] = {way.name: way for way in (Nccl, SharedMemory, Gloo, Snapshot)}
"""All ways by name, in the order in which ``auto`` tries them."""


def possible_ways(setting: str, pair: Pair) -> tuple[str, ...]:
    """The ways that a learner and a worker can use, best first.

    Args:
        setting: ``weights.transport``.

    Raises:
        WeightsError: they can't use the way that is set.

    >>> possible_ways("auto", Pair(sender="cuda:a", receiver="cuda:b", same_memory=False))
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
