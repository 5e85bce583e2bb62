"""Attention over rows that are packed on one line without padding, each of which sees itself alone.

A GPU's kernels for variable lengths take the line as it is and the places where rows begin, so that no
work is done for padding. There are three: flash-attn's, which transformers calls itself
(``flash_attention_2``); torch's own; and flex attention under a block-diagonal causal mask. The last two
are registered here. Prompts are not shared on such a line: the gradient of a shared prompt's keys and
values would be summed by atomic additions, in another order each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..rows.microbatch import PackedLayout
from .shared_prompts import band, plain, repeated

FLASH = "flash_attention_2"
"""transformers' name for flash-attn."""
VARLEN = "tandem_varlen"
"""The name under which transformers knows torch's kernel."""
FLEX = "tandem_flex"
"""The name under which transformers knows flex attention over packed rows."""
ARGUMENT = "packed_rows"
"""Keyword by which the layout reaches the attention layers."""
HALF = (torch.bfloat16, torch.float16)
"""Dtypes that torch's kernel and flash-attn compute in."""


def varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row by torch's kernel for variable lengths, for transformers' interface.

    ``query`` is ``[1, heads, F, d]``, ``key`` and ``value`` ``[1, kv heads, F, d]``; returns
    ``[1, F, heads, d]``. The kernel needs CUDA and half precision (untested: no GPU has run it); elsewhere
    each row goes through SDPA by itself. Without a layout among the keywords it is plain SDPA.

    Raises:
        NotImplementedError: the layer caps its scores or has attention sinks.
    """
    layout: PackedLayout | None = kwargs.pop(ARGUMENT, None)
    for feature in ("softcap", "s_aux"):
        if kwargs.get(feature) is not None:
            raise NotImplementedError(f"varlen has no {feature}, which the model's attention needs")
    if layout is None:
        return plain(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    window: int | None = kwargs.get("sliding_window")
    if query.device.type != "cuda" or query.dtype not in HALF:
        return _by_row(query, key, value, layout, window, scaling), None
    from torch.nn.attention.varlen import varlen_attn

    return _by_kernel(varlen_attn, query, key, value, layout, window, scaling), None


def _by_kernel(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Causal attention of each row by a kernel with the interface of torch's: ``[1, F, heads, d]``."""
    longest = max(layout.lengths)
    line: Tensor = kernel(
        *(part.squeeze(0).transpose(0, 1) for part in (query, key, value)),
        layout.ends,
        layout.ends,
        longest,
        longest,
        scale=scaling,
        # The kernel counts the tokens before a token; (-1, 0) is its plain causal attention.
        window_size=(window - 1, 0) if window and longest > window else (-1, 0),
        enable_gqa=True,
    )
    return line[None]


def _by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """The same, row by row through SDPA: ``[1, F, heads, d]``."""
    times = query.shape[1] // key.shape[1]
    found = []
    for q, k, v in zip(
        *(part.split(layout.lengths, 2) for part in (query, key, value)), strict=True
    ):
        length = q.shape[2]
        mask = band(length, window, q.device) if window and length > window else None
        k, v = repeated(k, times), repeated(v, times)
        found.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(found, 2).transpose(1, 2)


def flex(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row by flex attention, with the shapes of :func:`varlen`.

    It can cap scores and has attention sinks, in every dtype. It has a backward pass on CUDA alone
    (untested: no GPU has run it).
    """
    from transformers.integrations.flex_attention import flex_attention_forward

    layout: PackedLayout | None = kwargs.pop(ARGUMENT, None)
    if layout is None:
        layout = _one_row(query.shape[2], query.device)
    mask = _blocks(layout, kwargs.get("sliding_window"))
    result, _ = flex_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    return result, None


@lru_cache(maxsize=2)
def _blocks(layout: PackedLayout, window: int | None) -> Any:
    """Which tokens a token sees: those of its row up to itself, or the last ``window`` of them.

    All layers of a forward and backward pass ask for the same one or two.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    ends = layout.ends
    count = sum(layout.lengths)
    token = torch.arange(count, dtype=ends.dtype, device=ends.device)
    row = torch.searchsorted(ends, token, right=True)

    def sees(batch: Tensor, head: Tensor, reader: Tensor, read: Tensor) -> Tensor:
        found = (row[reader] == row[read]) & (reader >= read)
        return found & (reader - read < window) if window else found

    # Compiled, it never holds all pairs of tokens at once.
    return create_block_mask(
        sees, None, None, count, count, device=ends.device, _compile=ends.is_cuda
    )


@lru_cache(maxsize=2)
def _one_row(length: int, device: torch.device) -> PackedLayout:
    """The layout of rows that come without one, such as a dummy's."""
    ends = torch.tensor([0, length], dtype=torch.int32, device=device)
    return PackedLayout(
        lengths=(length,), ends=ends, positions=torch.arange(length, device=device)[None]
    )


def arguments(layout: PackedLayout, implementation: str) -> dict[str, Any]:
    """Arguments of the model besides the line of tokens.

    Args:
        layout: the line's layout.
        implementation: transformers' name of the model's attention.
    """
    if implementation == FLASH:
        # transformers takes the path of variable lengths only with all four of these, and with no mask.
        return {
            "position_ids": layout.positions,
            "attention_mask": None,
            "cu_seq_lens_q": layout.ends,
            "cu_seq_lens_k": layout.ends,
            "max_length_q": max(layout.lengths),
            "max_length_k": max(layout.lengths),
        }
    return {
        "position_ids": layout.positions,
        ARGUMENT: layout,
        # A mask with four dimensions keeps transformers from making its own, of size [F, F].
        "attention_mask": layout.positions.new_zeros(1, 1, 1, 1),
    }


def register() -> None:
    """Registers both with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, attention in ((VARLEN, varlen), (FLEX, flex)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)
