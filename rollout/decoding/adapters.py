"""Low-rank adapters in the torch engine: ``x Wᵀ + s (x Aᵀ) Bᵀ``, with the base model's W as it is.

A :class:`LowRank` is the second term of one matrix. The model's own forward, and so the generic decoder,
gets it from a hook on the linear layer. The direct decoder adds it to its own products; where it has
fused the matrices of several layers into one, their terms are fused as well (:func:`fuse`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.adapters import adapted_layers, scale_of
from ...common.config.learner import LoraConfig

KEY = "_tandem_low_rank"
"""Attribute of a linear layer with its term."""


class LowRank:
    """The term ``s (x Aᵀ) Bᵀ`` of a matrix ``[outputs, inputs]``; zero until B is loaded.

    ``a`` is ``[rank, inputs]``, ``b`` ``[outputs, rank]``.
    """

    __slots__ = ("a", "b", "scale")

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        self.a, self.b, self.scale = a, b, scale

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Adds the term for ``x`` ``[N, inputs]`` to ``out`` ``[N, outputs]``, in place."""
        return out.addmm_(x @ self.a.t(), self.b.t(), alpha=self.scale)


def attach(model: Any, lora: LoraConfig) -> dict[str, LowRank]:
    """Gives every layer that ``lora`` names its term; returns them by the layers' names.

    Args:
        model: a transformers causal model on its device, in the engine's dtype.
        lora: ``learner.lora``.

    Raises:
        ConfigError: the model has no such layers.
    """
    terms = {}
    for layer in adapted_layers(model, lora):
        module = model.get_submodule(layer.name)
        a, b = (module.weight.new_zeros(shape) for shape in layer.shapes(lora.rank))
        terms[layer.name] = term = LowRank(a, b, scale_of(lora))
        setattr(module, KEY, term)
        module.register_forward_hook(_hook)
    return terms


def _hook(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Adds a layer's term to what the layer has computed."""
    term: LowRank = getattr(module, KEY)
    (x,) = args
    return out + term.scale * ((x @ term.a.t()) @ term.b.t())


def tensors(terms: dict[str, LowRank]) -> dict[str, Tensor]:
    """A and B of every term under the names by which they travel."""
    return {
        f"{name}.lora_{letter}.weight": tensor
        for name, term in terms.items()
        for letter, tensor in (("A", term.a), ("B", term.b))
    }


def fuse(modules: Sequence[Any]) -> LowRank | None:
    """The term of several layers' matrices, one below the other; None if no layer has one.

    A holds the layers' A one below the other, and B their B in blocks, with zeros where a layer's outputs
    don't depend on another's A. So it is two products whatever the number of layers. The layers' own
    tensors become views of both: new ones only have to be copied into them.
    """
    found: list[LowRank | None] = [getattr(module, KEY, None) for module in modules]
    terms = [term for term in found if term is not None]
    if not terms:
        return None
    if len(modules) == 1:
        return terms[0]
    rank = len(terms[0].a)
    a = torch.cat([term.a for term in terms])
    b = a.new_zeros(sum(module.out_features for module in modules), len(a))
    row = column = 0
    for module, term in zip(modules, found, strict=True):
        if term is not None:
            block = b[row : row + module.out_features, column : column + rank]
            block.copy_(term.b)
            term.a, term.b = a[column : column + rank], block
            column += rank
        row += module.out_features
    return LowRank(a, b, terms[0].scale)
