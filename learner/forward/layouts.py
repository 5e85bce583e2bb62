"""Which attention computes a policy's rows, and how they are laid out for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

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


def register() -> None:
    """Registers Tandem's attentions with transformers."""
    shared_prompts.register()
    packed.register()
