"""The two processes of :mod:`update_processes` with adapters: the base model stays, and PEFT says what is right.

python adapter_processes.py LEARNER_FD WORKER_FD
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import adapter_models
import update_processes
from update_processes import Learner, Worker, config

from tandem.common.records import Version

SIZE = 0.18
"""Of A and B: large enough for a text that no other version says."""


class AdapterLearner(Learner):
    """Publishes random adapters."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        lora = config(self._folder, self._engine, "auto").learner.lora
        assert lora is not None
        adapter_models.SIZE = SIZE
        # PEFT changes the model that it is given.
        self._plain, self._lora = copy.deepcopy(self._model), lora
        self._tensors = self._draw(0)
        self._model = adapter_models.with_adapters(self._model, lora, self._tensors)

    def publish(self, step: int) -> None:
        """Publishes the adapters that were taken on."""
        assert self._publisher is not None
        version = Version(term=self._term, step=step)
        self._publisher.publish(version, list(self._tensors.items()))

    def _draw(self, seed: int) -> dict[str, torch.Tensor]:
        return adapter_models.drawn(self._plain, self._lora, seed)

    def _take_on(self, version: Version, attempt: int) -> None:
        self._tensors = self._draw((version.term * 1000 + version.step) * 100 + attempt)
        adapter_models.take_on(self._model, self._tensors)


if __name__ == "__main__":
    update_processes.main(AdapterLearner, Worker)
