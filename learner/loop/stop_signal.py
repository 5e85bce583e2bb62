"""SIGTERM, which asks the learner to drain."""

from __future__ import annotations

import signal
from types import FrameType

from ...common import disk


class StopSignal:
    """SIGTERM asks to drain. Followers leave that to rank 0."""

    def __init__(self, *, heed: bool) -> None:
        self.asked = False
        self._heed = heed
        signal.signal(signal.SIGTERM, self._on)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self.asked = self._heed
        if self._heed:
            disk.stop_waiting()
