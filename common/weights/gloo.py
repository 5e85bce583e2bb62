"""Weights over gloo: the way between CPUs, and wherever NCCL can't go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroupGloo

from ..errors import WeightsError
from ..sockets import local_address
from .channel import ProcessGroupWay, bucket_seconds, enter, first_line
from .protocol import Meeting

# torch's stubs leave out what is defined in C++.
_Gloo: Any = ProcessGroupGloo


class Gloo(ProcessGroupWay):
    """A gloo group, bound to one address; by default gloo listens on that of the host's name."""

    name: ClassVar[str] = "gloo"

    def close(self) -> None:
        """Closes the sockets."""
        self._group = None

    def _meet(self, at: Meeting) -> None:
        start = time.monotonic()
        end = start + self.settings.open_seconds
        store = enter(at, self.settings.open_seconds)
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=max(0.1, end - time.monotonic()))
        options._threads = 1
        address = local_address(self.settings.interface, at.host)
        options._devices = [_Gloo.create_device(hostname=address, lazy_init=False)]
        try:
            self._group = _Gloo(store, at.rank, at.world_size, options)
        except RuntimeError as error:
            raise WeightsError(
                f"the other side didn't enter the gloo channel within "
                f"{time.monotonic() - start:.1f} s: {first_line(error)}"
            ) from None

    def _transfer(self, pieces: Sequence[torch.Tensor], verb: str) -> Iterator[int]:
        deadline = time.monotonic() + self.settings.stage_seconds
        # All are posted at once, so that the wire stays busy.
        works = [self._begin(verb, piece, index) for index, piece in enumerate(pieces)]
        for index, work in enumerate(works):
            start, nbytes = time.monotonic(), pieces[index].numel()
            try:
                work.wait(timedelta(seconds=bucket_seconds(nbytes, deadline - start)))
            except RuntimeError as error:
                raise WeightsError(
                    f"gloo couldn't {verb} a bucket of {nbytes:,} bytes in "
                    f"{time.monotonic() - start:.1f} s: {first_line(error)}"
                ) from None
            yield index
