"""What Tandem adds to vLLM's workers, with more in it for tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tandem.common.errors import WeightsError
from tandem.common.weights.manifest import plan
from tandem.rollout.vllm.vllm_extension import WorkerExtension

FAULTS = "TANDEM_TEST_FAULTS"
"""Environment variable with the path of a file whose content, such as ``map 1`` or ``kill 0``, names
what fails in which rank."""


class ReadableRank(WorkerExtension):
    """A rank that tells which weights it holds."""

    def tandem_digests(self) -> dict[str, str]:
        """By name, of those that vLLM's kernels don't pack."""
        from half_processes import digest

        model = self.get_model()
        held = {name: p for name, p in model.named_parameters() if p.numel()}
        # vLLM fills the embedding up to a whole number of 64 rows, and on processors with AMX some of its kernels
        # keep their bias in float32.
        rows, dtype = model.config.vocab_size, model.lm_head.weight.dtype
        return {
            n: digest(p[:rows] if "embed" in n else p.to(dtype) if n.endswith("bias") else p)
            for n, p in held.items()
        }


class FailingRank(WorkerExtension):
    """A rank that fails where the file says so."""

    rank: int
    """The worker's own."""

    def _tandem_map(self, path: str, layout: str) -> list[tuple[str, Any]]:
        if self._tandem_fails("map"):
            # Damaged for this rank alone: a layout that doesn't fit the segment.
            layout = plan([("planted", (1 << 20,), "float32")], 1 << 20).text
        return super()._tandem_map(path, layout)

    def _tandem_take(self, tensors: list[tuple[str, Any]]) -> None:
        if self._tandem_fails("kill"):
            # With a part of the new weights in place.
            super()._tandem_take(tensors[: len(tensors) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if self._tandem_fails("take"):
            raise WeightsError("planted")
        super()._tandem_take(tensors)

    def _tandem_fails(self, how: str) -> bool:
        file = Path(os.environ[FAULTS])
        return file.exists() and file.read_text().split() == [how, str(self.rank)]
