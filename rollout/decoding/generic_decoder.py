"""The decoder for any causal model of transformers: the model's own forward over a batch's slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from ...common.errors import ConfigError
from .decoder import CHUNKED, FULL, SLIDING, KeyValues, layer_kinds, visible

WAYS = ("by_layer", "one", "padding")
"""Ways in which :class:`GenericDecoder` may tell the model what a row sees."""


class _SlotLayer(CacheLayerMixin):
    """One layer's slots, in the form that transformers' attention expects."""

    def __init__(self, store: Tensor, positions: Tensor, end: int, sizes: tuple[int, int]) -> None:
        super().__init__()
        self._positions, self._end = positions, end
        self._rows = torch.arange(len(positions), device=positions.device)
        self.keys, self.values = store[0, ..., : sizes[0]], store[1, ..., : sizes[1]]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing, since the store exists already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores one token per row in its slot; returns all slots up to the last one in use."""
        self.keys[self._rows, :, self._positions] = key_states[:, :, 0]
        self.values[self._rows, :, self._positions] = value_states[:, :, 0]
        return self.keys[:, :, : self._end], self.values[:, :, : self._end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys seen, and the first one's offset."""
        return self._end, 0

    def get_seq_length(self) -> int:
        """Number of tokens before this one, in the longest row."""
        return self._end - 1

    def get_max_length(self) -> int:
        """Returns -1: there is no limit of its own."""
        return -1


class GenericDecoder:
    """Runs any transformers causal model whose layers keep keys and values, through its own forward.

    The model is told which tokens a row sees in one of transformers' ways: with one mask for each kind
    of layer (``by_layer``), with one for all of them (``one``), or, for models that derive more than a
    mask from it, by which slots are in use (``padding``).
    """

    def __init__(self, model: Any, way: str = "one") -> None:
        config = model.config.get_text_config()
        states = layer_kinds(config) - {FULL, SLIDING, CHUNKED}
        if states:
            raise ConfigError(
                f"the torch engine keeps keys and values only, and {config.model_type} has layers "
                f"of {', '.join(sorted(states))}: use rollout.engine=vllm"
            )
        if "flash" in str(config._attn_implementation):
            raise ConfigError(
                f"the torch engine masks slots itself, which {config._attn_implementation} "
                f"can't: set model.attention=sdpa"
            )
        self._model = model
        self._way = way
        self._kinds = layer_kinds(config)
        self._window = getattr(config, "sliding_window", None) or None
        self._chunk = getattr(config, "attention_chunk_size", None) or None
        # Per layer: keys and values may differ in size, but are in one tensor.
        self._sizes: list[tuple[int, int]] = []

    def prefill(self, tokens: Tensor, lengths: Tensor) -> KeyValues:
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        cache = DynamicCache()
        self._model(
            input_ids=tokens,
            attention_mask=(slots < lengths[:, None]).long(),
            position_ids=slots[None].expand(len(tokens), -1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._sizes = [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in cache.layers]
        return KeyValues([_together(layer.keys, layer.values) for layer in cache.layers])

    def logits(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self._model(
            input_ids=tokens,
            attention_mask=(slots < lengths[:, None]).long(),
            position_ids=slots[None].expand(len(tokens), -1),
            use_cache=False,
        ).logits
        return logits

    def step(self, tokens: Tensor, positions: np.ndarray, cache: KeyValues) -> Tensor:
        at = torch.from_numpy(positions).to(tokens.device)
        end = int(positions.max()) + 1
        layers = zip(cache.layers, self._sizes, strict=True)
        slots = Cache(layers=[_SlotLayer(store, at, end, sizes) for store, sizes in layers])
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask(positions, at),
            position_ids=at[:, None],
            past_key_values=slots,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _mask(self, positions: np.ndarray, at: Tensor) -> Tensor | dict[str, Tensor]:
        seen = visible(positions, at.device, self._model.dtype)
        if self._way == "padding":
            return (seen == 0).long()
        if self._way == "by_layer":
            return {kind: self._narrowed(seen, kind, at)[:, None, None] for kind in self._kinds}
        (kind,) = self._kinds if len(self._kinds) == 1 else (SLIDING,)
        return self._narrowed(seen, kind, at)[:, None, None]

    def _narrowed(self, seen: Tensor, kind: str, at: Tensor) -> Tensor:
        """``[B, end]`` additive mask without what is before a layer's window or chunk."""
        if kind == SLIDING and self._window is not None:
            first = at + 1 - self._window
        elif kind == CHUNKED and self._chunk is not None:
            first = at - at % self._chunk
        else:
            return seen
        slots = torch.arange(seen.shape[1], device=at.device)
        return seen.masked_fill(slots < first[:, None], float("-inf"))


def _together(keys: Tensor, values: Tensor) -> Tensor:
    """``[2, B, KV heads, S, size]``, with the smaller of the two padded with zeros."""
    size = max(keys.shape[-1], values.shape[-1])
    return torch.stack([F.pad(part, (0, size - part.shape[-1])) for part in (keys, values)])
