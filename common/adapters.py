"""Low-rank adapters (LoRA, arXiv 2106.09685): which linear layers have one, and the tensors that travel.

A layer computes ``x Wᵀ + s (x Aᵀ) Bᵀ`` with A ``[rank, inputs]``, B ``[outputs, rank]`` and s = alpha / rank
(``alpha / √rank`` with ``rslora``, arXiv 2312.03732). Learner and engines derive the same names, shapes and order
from the base model and the settings alone. This file imports torch only where a model is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from .errors import ConfigError, DataError
from .models import local_folder

if TYPE_CHECKING:
    from .config.learner import LoraConfig
    from .config.model import ModelConfig

DIGEST_BYTES = 1 << 24
"""Bytes of a weights file that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """One linear layer of the base model that has an adapter."""

    name: str
    """The module's name in transformers, such as ``model.layers.0.self_attn.q_proj``."""
    inputs: int
    outputs: int

    @property
    def names(self) -> tuple[str, str]:
        """Names of A and B, as they travel and as PEFT writes them (after ``base_model.model.``)."""
        return f"{self.name}.lora_A.weight", f"{self.name}.lora_B.weight"

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of A and B."""
        return (rank, self.inputs), (self.outputs, rank)


def scale_of(lora: LoraConfig) -> float:
    """The factor s of the low-rank product."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def adapted_layers(model: Any, lora: LoraConfig) -> tuple[AdaptedLayer, ...]:
    """The layers that get an adapter, in the model's order.

    Args:
        model: a transformers model without adapters; its weights may be on the meta device.
        lora: ``learner.lora``. ``all-linear`` means every linear layer but the output head.

    Raises:
        ConfigError: a target matches no linear layer, or the output head.
    """
    from torch import nn

    head = model.get_output_embeddings()
    # A subclass that computes something else, such as a router of experts, isn't a linear layer.
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    kept = {name: module for name, module in linear.items() if module is not head}
    if lora.targets != "all-linear":
        for target in lora.targets:
            if any(_is_named(name, target) for name in kept):
                continue
            known = ", ".join(sorted({name.rpartition(".")[2] for name in kept}))
            raise ConfigError(
                f"learner.lora.targets names {target!r}, which isn't a linear layer of the model's body: "
                f"choose among {known}, or set learner.lora.targets=all-linear"
            )
        kept = {
            name: module
            for name, module in kept.items()
            if any(_is_named(name, target) for target in lora.targets)
        }
    if not kept:
        raise ConfigError("learner.lora: the model has no linear layer that could have an adapter")
    return tuple(
        AdaptedLayer(name=name, inputs=module.in_features, outputs=module.out_features)
        for name, module in kept.items()
    )


def _is_named(name: str, target: str) -> bool:
    """Whether a module's name is the target or ends with it, as in PEFT."""
    return name == target or name.endswith(f".{target}")


def adapter_tensors(layers: Sequence[AdaptedLayer], rank: int) -> list[tuple[str, tuple[int, int]]]:
    """Name and shape of every tensor that travels, in order: each layer's A, then its B."""
    return [
        tensor for layer in layers for tensor in zip(layer.names, layer.shapes(rank), strict=True)
    ]


def base_of(model: ModelConfig, lora: LoraConfig | None) -> str:
    """:func:`base_digest` of the model that adapters are for; empty if there are none.

    Raises:
        DataError: the weights aren't on this host, or can't be read.
    """
    return "" if lora is None else base_digest(local_folder(model.path))


def base_digest(folder: Path) -> str:
    """Digest of a model folder's weights: the names and bytes of its weights files, in order.

    Raises:
        DataError: the folder has no weights, or one can't be read.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise DataError(f"{folder} has no weights (*.safetensors)")
    digest = xxhash.xxh3_128()
    try:
        for path in files:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with open(path, "rb") as file:
                while chunk := file.read(DIGEST_BYTES):
                    digest.update(chunk)
    except OSError as error:
        raise DataError(f"the base model's weights in {folder} can't be read: {error}") from None
    return digest.hexdigest()
