"""The torch engine with a fault: ``rollout.engine=planted_engine:make``.

``TANDEM_PLANTED=STEP,TIMES`` swaps two matrices, behind all checksums, in the first so many loads of
weights from that step on. ``TANDEM_SLOW=STEP,SECONDS`` lets the load of that step's weights take so
long, and ``TANDEM_REFUSED=STEP`` refuses it afterwards. ``TANDEM_BROKEN=PREFIX`` breaks the engine when it is given a
group whose id begins so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tandem.common.config import ModelConfig, RolloutConfig
from tandem.common.errors import TandemError
from tandem.common.models import load_model, load_tokenizer
from tandem.common.records import Version
from tandem.rollout.decoding.torch_engine import TorchEngine
from tandem.rollout.engine import FinishedGroup, GroupRequest, NamedWeights

FIRST, SECOND = (f"model.layers.{number}.self_attn.o_proj.weight" for number in (0, 1))


class PlantedEngine(TorchEngine):
    """See the module."""

    _step, _times = map(int, os.environ.get("TANDEM_PLANTED", "0,0").split(","))

    _slow, _seconds = map(float, os.environ.get("TANDEM_SLOW", "-1,0").split(","))
    _refused = int(os.environ.get("TANDEM_REFUSED", "-1"))
    _breaking = os.environ.get("TANDEM_BROKEN")
    broken = ""

    async def load(self, state: Any, version: Version) -> None:
        """As the torch engine's, but for the fault."""
        if version.step == self._slow:
            await asyncio.sleep(self._seconds)
        if version.step == self._refused:
            state = NamedWeights({})
        tensors = dict(state.tensors())
        if version.step >= self._step and self._times:
            self._times -= 1
            tensors[FIRST], tensors[SECOND] = tensors[SECOND], tensors[FIRST]
        await super().load(NamedWeights(tensors), version)

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """As the torch engine's, until it is broken."""
        if self._breaking and any(one.group_id.startswith(self._breaking) for one in requests):
            self.broken = "the engine has died"
        if self.broken:
            raise TandemError(self.broken)
        return super().generate(requests)


def make(model: ModelConfig, rollout: RolloutConfig, *, max_rows: int) -> PlantedEngine:
    """The factory that ``rollout.engine`` names."""
    return PlantedEngine(
        load_model(model.path, dtype="float32"),
        load_tokenizer(model.path),
        recompute_kv=rollout.recompute_kv,
        max_rows=max_rows,
    )
