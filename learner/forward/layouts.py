"""Which attention computes a policy's rows, and how they are laid out for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..rows.microbatch import Layout, LayoutName, SharedLayout
from . import packed, shared_prompts
from .packed import FLASH, FLEX, HALF, VARLEN

NAMES = {shared_prompts.IMPLEMENTATION: "sdpa", VARLEN: "varlen", FLEX: "flex"}
"""What a user calls the attentions that Tandem registers with transformers."""
SHOWN: dict[LayoutName, str] = {
    "padded": "padded rows",
    "shared": "prompts shared on a line without padding",
    "packed": "rows packed on a line without padding",
}
"""What a log calls each layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """An attention with the layout that it takes."""

    layout: LayoutName
    """The layout of micro-batches."""
    implementation: str
    """transformers' name of the attention."""
    reason: str = ""
    """Why none that may be faster is tried; empty if there is none."""

    def __str__(self) -> str:
        return f"{named(self.implementation)}, {SHOWN[self.layout]}"


def named(implementation: str) -> str:
    """What a user calls an attention."""
    return NAMES.get(implementation, implementation)


def fastest(attention: str, loaded: str, device: str, dtype: torch.dtype) -> Way:
    """The fastest way that suits a setting, a device and a dtype; whether it suits the model is to be tried out.

    Args:
        attention: ``model.attention`` of the config.
        loaded: transformers' name of what :func:`tandem.common.models.choose_attention` took for it.
        device: type of the model's device.
        dtype: dtype of its parameters.
    """
    kernels = device == "cuda" and dtype in HALF
    if attention == "flex":
        return Way(layout="packed", implementation=FLEX)
    if attention == "varlen":
        reason = "" if kernels else "by sdpa, row by row: the kernel needs CUDA and half precision"
        return Way(layout="packed", implementation=VARLEN, reason=reason)
    if loaded == FLASH:
        return Way(layout="packed", implementation=FLASH)
    if loaded == "sdpa" and device == "cpu":
        return Way(layout="shared", implementation=shared_prompts.IMPLEMENTATION)
    if attention == "auto" and kernels and loaded == "sdpa":
        from transformers.utils import is_flash_attn_2_available

        there = is_flash_attn_2_available()
        why = "transformers has none for this model" if there else "flash-attn isn't installed"
        return Way(layout="packed", implementation=VARLEN, reason=f"not {FLASH}: {why}")
    reason = ""
    if attention == "auto" and loaded == "eager":
        reason = "sdpa can't do this model's attention, such as a cap or sinks of the scores"
    elif attention == "auto":
        reason = f"{FLASH} and varlen need half precision"
    return Way(layout="padded", implementation=loaded, reason=reason)


def arguments(layout: Layout, implementation: str) -> dict[str, Any]:
    """Arguments of a model besides the line of tokens.

    Args:
        layout: the line's layout.
        implementation: transformers' name of the model's attention.
    """
    if isinstance(layout, SharedLayout):
        return shared_prompts.arguments(layout)
    return packed.arguments(layout, implementation)


def rounded(
    input_ids: Tensor, index: Tensor, layout: Layout | None, limit: int | None = None
) -> tuple[Tensor, Tensor, Layout | None]:
    """A micro-batch with a few tokens more, so that its sizes are among few.

    oneDNN, which multiplies in bfloat16 on CPUs, compiles a product for every new size and keeps the last thousand of
    them: without this, updates of 4,000 tokens each left 30 MB more behind, and took 4% longer.

    Args:
        input_ids: ``[r, S]`` or ``[1, F]``.
        index: ``[N]`` places in the flattened ids.
        layout: the line's layout, or None for padded rows.
        limit: positions that the model has, beyond which no padded row is rounded; None = no bound.

    Returns:
        The same with S or F, and N, rounded up. Nothing that is asked for depends on what is added.
    """
    width = input_ids.shape[1]
    more = _round_up(width) - width
    if layout is None:
        more = min(more, max(limit - width, 0)) if limit else more
        index = index + index // width * more
    elif isinstance(layout, SharedLayout):
        # A token that no row has sees what the first cell sees.
        layout = replace(
            layout,
            positions=pad(layout.positions, (0, more)),
            back=pad(layout.back, (0, more)),
        )
    else:
        more = 0
    return pad(input_ids, (0, more)), pad(index, (0, _round_up(len(index)) - len(index))), layout


def _round_up(size: int) -> int:
    """The next of 32 sizes in each power of two."""
    step = 1 << max(size.bit_length() - 6, 0)
    return -(-size // step) * step


def register() -> None:
    """Registers Tandem's attentions with transformers."""
    shared_prompts.register()
    packed.register()
