"""Liger's fused kernels in the place of a model's norms, rotary positions and gated MLPs.

Each reads and writes a layer's activations once, where transformers' single operations do so several times, and fewer
activations are kept for the backward pass (Hsu et al. 2024, arXiv 2410.10989).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WHICH = {
    **dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), True),
    # It would be put into transformers' table of activations.
    "relu_squared": False,
    # A policy computes its log-probs itself, with their entropies.
    **dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), False),
}
"""Liger's names of the kernels that are taken; a model has some of them."""


def refusal(model: PreTrainedModel) -> str | None:
    """Why a model can't have them; None if it can."""
    from transformers.utils import is_liger_kernel_available

    if model.device.type != "cuda":
        return "they need a GPU"
    if not is_liger_kernel_available():
        return "liger-kernel isn't installed"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    return None if kind in MODEL_TYPE_TO_APPLY_LIGER_FN else f"Liger has none for {kind!r}"


def fuse(model: PreTrainedModel) -> Callable[[], None]:
    """Puts the kernels into a model, and returns what takes them out again.

    Liger replaces classes and functions of transformers' module, too, which would reach every model that is loaded
    later, on a CPU as well: the classes are put back, and a function is Liger's on GPUs alone. The experts of a
    mixture stay transformers': Liger's multiply in TF32, which is off by up to 0.0085 nats in float32, and take a
    minute to tune themselves.

    Raises:
        ValueError: Liger has none for a layer of this model.
    """
    from transformers.integrations.liger import apply_liger_kernel

    source = sys.modules[type(model).__module__]
    names = dict(vars(source))
    modules = [(module, dict(vars(module))) for module in model.modules()]

    def put_back() -> None:
        for name, value in names.items():
            setattr(source, name, value)
        for module, before in modules:
            _restore(module, before)

    try:
        try:
            apply_liger_kernel(model, WHICH)
        except NotImplementedError:
            # Liger's answer to rotary positions that it doesn't have, before it has changed anything.
            apply_liger_kernel(model, {**WHICH, "rope": False})
        for module, before in modules:
            forward = vars(module).get("forward")
            if getattr(forward, "__qualname__", None) == "LigerExperts.forward":
                _restore(module, before)
        if not any(vars(module) != before for module, before in modules):
            raise ValueError("none of its layers has one")
        for name, plain in names.items():
            liger = getattr(source, name)
            if liger is not plain:
                setattr(
                    source, name, plain if isinstance(plain, type) else _by_device(liger, plain)
                )
    except BaseException:
        put_back()
        raise
    return put_back


def _restore(module: torch.nn.Module, before: dict[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(before)


def _by_device(liger: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is Liger's for tensors on a GPU."""

    @functools.wraps(plain)
    def call(first: Any, *rest: Any, **others: Any) -> Any:
        return (liger if first.is_cuda else plain)(first, *rest, **others)

    return call
