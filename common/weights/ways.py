"""The ways by which weights can reach a worker, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..config import WeightsConfig
from ..errors import WeightsError
from .channel import Pair, Way
from .gloo import Gloo
from .nccl import Nccl
from .shared_memory import SharedMemory, shared_memory_name
from .snapshot import Snapshot

WAYS: dict[str, type[Way]] = {way.name: way for way in (Nccl, SharedMemory, Gloo, Snapshot)}
"""All ways by name, in the order in which ``auto`` tries them."""


MakeWay = Callable[[str, WeightsConfig, torch.device], Way]
"""Makes one end of a way, given its name in :data:`WAYS`, the ``weights`` section and a GPU."""


def make_way(name: str, settings: WeightsConfig, device: torch.device) -> Way:
    """One end of the named way."""
    return WAYS[name](settings, device)


def possible_ways(setting: str, pair: Pair, offered: Sequence[str]) -> tuple[str, ...]:
    """The ways that a pair can use, best first.

    Args:
        setting: ``weights.transport``.
        pair: the learner and the worker.
        offered: the ways that the worker supports.

    Raises:
        WeightsError: the pair can't use the way that is set, or has no way at all.

    >>> gpus = Pair(sender="cuda:a", receiver="cuda:b", same_memory=False)
    >>> possible_ways("auto", gpus, ["nccl", "shared_memory", "gloo"])
    ('nccl', 'gloo')
    """
    if setting == "auto":
        found = tuple(
            name for name, way in WAYS.items() if name in offered and not way.obstacle(pair)
        )
        if not found:
            raise WeightsError(f"the worker can only do {', '.join(offered) or 'nothing'}")
        return found
    if setting not in offered:
        raise WeightsError(
            f"weights.transport={setting}, but the worker can only do {', '.join(offered)}"
        )
    obstacle = WAYS[setting].obstacle(pair)
    if obstacle:
        raise WeightsError(f"weights.transport={setting} {obstacle}")
    return (setting,)


def device_name(device: torch.device) -> str:
    """``cpu``, or ``cuda:<uuid>``, which tells GPUs apart across processes."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def offered_ways(device: torch.device) -> tuple[str, ...]:
    """The ways that a process supports if weights may pass through ``device``, best first."""
    able = {
        SharedMemory.name: bool(shared_memory_name()),
        Nccl.name: device.type == "cuda" and torch.distributed.is_nccl_available(),
    }
    return tuple(name for name in WAYS if able.get(name, True))
