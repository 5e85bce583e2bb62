"""Hands a set of weights to other processes of the host, where they don't lie in a segment yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ..common.weights.buffer import views
from ..common.weights.manifest import SegmentPlace, plan
from ..common.weights.segment import Segment


@contextlib.contextmanager
def handed_over(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[SegmentPlace]:
    """Copies the tensors into a segment, which is removed at the end.

    Raises:
        WeightsError: there is no room for it anywhere.
    """
    content = [(name, tensor.detach()) for name, tensor in tensors]
    layout = plan(((name, tensor.shape, tensor.dtype) for name, tensor in content), 1 << 30)
    segment = Segment(layout.total_bytes)
    try:
        copies = views(segment.buffer, layout.params)
        for (_, tensor), (_, copy) in zip(content, copies, strict=True):
            copy.copy_(tensor)
        yield SegmentPlace(path=str(segment.path), nbytes=layout.total_bytes, layout=layout.text)
    finally:
        segment.close()
