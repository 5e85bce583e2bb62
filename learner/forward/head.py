"""The model's output head, which turns hidden states into logits.

Some models do more than multiply by the output matrix: they add a bias (Phi), multiply the logits
by a constant (Cohere, Granite, Falcon-H1) or bound them by a soft cap (Gemma 2). What a model does
after its matrix is determined by experiment: the matrix is made to give known numbers once, and the
resulting logits show the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CLOSE = 1e-3
"""Greatest relative difference between a model's logits and the recognised formula for them."""
_LARGEST = 64.0
"""Size of the numbers that are tried; caps are smaller."""

_TRIED = 2048
"""Least number of logits that are compared, if there are as many."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """logits = f(hidden Wᵀ + b), with f(z) = scale z, or cap tanh(scale z / cap)."""

    layer: nn.Module
    """The model's own layer, since its parameters may be replaced by others."""
    scale: float
    """Factor of the logits."""
    cap: float | None
    """Bound of the logits' size; None if there is none."""

    @property
    def weight(self) -> Tensor:
        """``[V, H]`` output matrix."""
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """``[V]`` bias, or None."""
        bias: Tensor | None = getattr(self.layer, "bias", None)
        return bias


def head_of(model: PreTrainedModel) -> Head:
    """The head of a model whose parameters are whole.

    Raises:
        ConfigError: it has no output matrix, or changes its logits in an unknown way.
    """
    kind = model.config.model_type
    layer = model.get_output_embeddings()
    if layer is None or not isinstance(getattr(layer, "weight", None), Tensor):
        raise ConfigError(
            f"model type {kind!r} has no output matrix, from which the learner takes its "
            f"log-probs: use another model"
        )
    given, made = _try(model, layer)
    # A few thousand logits are enough; in float64, so that rounding doesn't matter.
    some = slice(None, None, max(1, len(given) // _TRIED))
    scale, cap = _recognised(
        given[some].double(), made[some].double(), list(_numbers(model.config)), kind
    )
    return Head(layer=layer, scale=scale, cap=cap)


@torch.no_grad()
def _try(model: PreTrainedModel, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Numbers in place of the matrix product, and the logits that the model makes of them."""
    given: list[Tensor] = []

    def replace(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        size = output.numel()
        # Spread evenly and without zeros, whatever their number.
        ramp = torch.linspace(-_LARGEST, _LARGEST, size + size % 2, device=output.device)
        given.append(ramp[:size].reshape(output.shape))
        return given[-1]

    hook = layer.register_forward_hook(replace)
    training = model.training
    try:
        device = model.get_input_embeddings().weight.device
        ids = torch.arange(3, device=device)[None]
        logits: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    finally:
        model.train(training)
        hook.remove()
    if not given or given[-1].shape != logits.shape:
        # The logits don't come from calling the matrix; the comparison at the start will decide.
        return logits.reshape(-1), logits.reshape(-1)
    return given[-1].reshape(-1), logits.reshape(-1)


def _recognised(
    given: Tensor, made: Tensor, numbers: list[float], kind: str
) -> tuple[float, float | None]:
    """Scale and cap; the simplest among equally good ones."""
    candidates: list[tuple[float, float | None]] = [(1.0, None)]
    for number in numbers:
        candidates += [(number, None), (1.0 / number, None), (1.0, abs(number))]
    # A constant that isn't in the config.
    candidates.append((float((given @ made) / (given @ given)), None))
    best, error = candidates[0], float("inf")
    for scale, cap in candidates:
        fitted = given * scale if cap is None else cap * torch.tanh(given * scale / cap)
        off = float((fitted - made).abs().max() / made.abs().max().clamp_min(1e-30))
        # With a margin, so that float32 rounding doesn't decide.
        if off < 0.5 * error:
            best, error = (scale, cap), off
    if not error < _CLOSE:
        raise ConfigError(
            f"model type {kind!r} changes its logits after the output matrix in a way that the "
            f"learner doesn't know (a factor or a tanh cap fits to {error:.1%} at best): use "
            f"another model"
        )
    return best


def _numbers(config: Any) -> Iterator[float]:
    """Every number of a config that could be a factor or a cap, each once."""
    seen: set[float] = set()
    stack: list[Any] = [config.to_dict(), config.get_text_config().to_dict()]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            number = float(value)
            if number and abs(number) < 1e9 and number not in seen:
                seen.add(number)
                yield number
