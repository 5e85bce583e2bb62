"""vLLM engines for tests: one vLLM with a tiny model, and an engine on it for whoever asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tandem.common.config.learner import LoraConfig
from tandem.common.records import Version
from tandem.rollout.engine import NamedWeights
from tandem.rollout.model_facts import ModelFacts, facts_of, model_facts
from tandem.rollout.vllm import vllm_adapters
from tandem.rollout.vllm.vllm_engine import VllmEngine
from tandem.rollout.vllm.vllm_process import VllmProcess

ROWS = 64
"""Samples that vLLM runs at a time."""


class Shared:
    """One vLLM, started when it is first needed."""

    def __init__(self, folder: Path, tiny: Any, **more: Any) -> None:
        self.folder = folder
        self._tiny = tiny
        self.tokenizer = tiny.tokenizer()
        tiny.model().save_pretrained(folder)
        self.facts: ModelFacts = model_facts(
            str(folder), dtype="float32", context=None, tokenizer=self.tokenizer
        )
        self.process = VllmProcess({**self.arguments(folder, self.facts.context), **more})

    @staticmethod
    def arguments(folder: Path, context: int) -> dict[str, Any]:
        """The smallest vLLM."""
        return {
            "model": str(folder),
            "dtype": "float32",
            "max_model_len": context,
            "max_num_seqs": ROWS,
            "kv_cache_memory_bytes": 128 << 20,
        }

    def make(self, model: Any, *, max_rows: int = 0, **settings: Any) -> VllmEngine:
        """An engine with a model's weights; ``max_rows`` is vLLM's own matter, set at its start."""
        del max_rows
        return Borrowed(self, self._tiny.weights(model), settings)

    def close(self) -> None:
        """Ends vLLM."""
        asyncio.run(self.process.stop())


class Borrowed(VllmEngine):
    """An engine that takes over the running vLLM and gives it its weights."""

    def __init__(self, shared: Shared, weights: Any, settings: dict[str, Any]) -> None:
        self._named_version = settings.pop("version", None)
        super().__init__(
            shared.process, shared.tokenizer, shared.facts, owns_process=False, **settings
        )
        self._first_weights = weights

    async def start(self) -> None:
        await super().start()
        await self.load(NamedWeights(self._first_weights), Version(term=0, step=0))
        await self._process.run(self._weights._name(self._named_version))
        self._weights.loads = 0


class Adapted(Shared):
    """One vLLM whose engines load adapters of the tiny model."""

    def __init__(self, folder: Path, tiny: Any, lora: LoraConfig, *, versions: int) -> None:
        specs = facts_of(tiny.model(), tiny.tokenizer(), lora=lora).specs
        super().__init__(folder, tiny, **vllm_adapters.arguments(lora, versions, specs))
        self._lora, self._versions = lora, versions

    def make(self, model: Any = None, *, max_rows: int = 0, **settings: Any) -> VllmEngine:
        """An engine with the tiny model's own weights."""
        del model, max_rows
        lora = settings.pop("lora", self._lora)
        facts = model_facts(
            str(self.folder), dtype="float32", context=None, tokenizer=self.tokenizer, lora=lora
        )
        return VllmEngine(
            self.process,
            self.tokenizer,
            facts,
            owns_process=False,
            lora=lora,
            versions=self._versions,
            **settings,
        )
