"""Which GPUs of this host processes of Tandem's hold, so that whoever is added to a run takes others."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from ..plan.hardware import Gpu


class HeldGpus:
    """GPUs that this process holds, for the processes that it starts or for itself.

    Each is a Unix socket with an abstract name, which the kernel takes back when the process ends, however it does.
    Containers with networks of their own don't see one another's.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, gpus: Iterable[Gpu], most: int | None = None) -> list[Gpu]:
        """Holds those of the GPUs that no other process holds, at most so many, and returns them."""
        taken: list[Gpu] = []
        for gpu in gpus:
            if most is not None and len(taken) == most:
                break
            if self._take(gpu):
                taken.append(gpu)
        return taken

    def release(self, keep: int = 0) -> None:
        """Leaves all of them to others, but for so many that were taken first."""
        while len(self._sockets) > keep:
            self._sockets.pop().close()

    def _take(self, gpu: Gpu) -> bool:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0tandem-gpu-{gpu.uuid or gpu.index}")
        except OSError as error:
            held.close()
            # Elsewhere than on Linux there are no such names, and GPUs are as free as they seem.
            return error.errno != errno.EADDRINUSE
        self._sockets.append(held)
        return True
