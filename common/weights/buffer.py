"""One flat buffer and the tensors in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .manifest import SegmentPlace, TensorEntry


class StagedTensors(list[tuple[str, torch.Tensor]]):
    """(name, view) of a version's tensors, and where other processes can map their buffer.

    Args:
        items: The tensors, in the manifest's order.
        place: None where other processes can't see them.
    """

    def __init__(
        self, items: Sequence[tuple[str, torch.Tensor]] = (), place: SegmentPlace | None = None
    ) -> None:
        super().__init__(items)
        self.place = place


def flat_buffer(total_bytes: int, device: torch.device) -> torch.Tensor:
    """A zeroed uint8 buffer: padding between tensors is sent and summed, so it must be defined."""
    return torch.zeros(total_bytes, dtype=torch.uint8, device=device)


def views(buffer: torch.Tensor, params: Sequence[TensorEntry]) -> list[tuple[str, torch.Tensor]]:
    """(name, view) of every tensor, sharing the buffer's memory."""
    found: list[tuple[str, torch.Tensor]] = []
    for p in params:
        dtype: torch.dtype = getattr(torch, p.dtype)
        piece = buffer[p.offset : p.offset + p.nbytes]
        found.append((p.name, piece.view(dtype).view(p.shape)))
    return found
