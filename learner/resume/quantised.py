"""The moments of an optimizer that keeps them in 8 bits, as the numbers that they stand for.

A checkpoint has these, so that another division of the parameters, or AdamW itself, can go on from it. They are
float64, in which a code times the float32 scale of its block is exact: quantised again in the same blocks, they give
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Moments that share a scale, in bitsandbytes."""
CHUNK = BLOCK << 14
"""Moments that are in host memory at a time while a checkpoint is loaded: 32 MiB of float64."""
KINDS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""AdamW's name of each moment, and the end of bitsandbytes' names."""
STEP = "step"


def is_quantised(optimizer: Any) -> bool:
    """Whether it is an optimizer of bitsandbytes."""
    return hasattr(optimizer, "name2qmap")


def moments(state: Mapping[str, Any], start: int, count: int) -> dict[str, Tensor]:
    """``[count]`` values of both moments from element ``start`` of a tensor's state on; empty before its first step."""
    found = {}
    for name, end in KINDS.items() if state else ():
        values = state[f"state{end}"].view(-1).narrow(0, start, count)
        if values.dtype == torch.uint8:
            blocks = torch.arange(start, start + count, device=values.device) // BLOCK
            scales = state[f"absmax{end}"].double()[blocks]
            values = state[f"qmap{end}"].double()[values.long()] * scales
        # Small tensors have float32 moments.
        found[name] = values.detach()
    return found


def set_moments(
    optimizer: Any,
    master: Tensor,
    values: Callable[[str, int, int], Tensor],
    step: float | None,
) -> None:
    """Puts the moments of a whole tensor into an optimizer, some blocks at a time.

    Args:
        optimizer: an optimizer of bitsandbytes.
        master: the tensor that it steps.
        values: returns ``[count]`` float64 in host memory, from AdamW's name of a moment, the first element, and the
            number of elements.
        step: the optimizer's count; None before its first step.
    """
    if step is None:
        optimizer.state.pop(master, None)
        return
    state = optimizer.state[master]
    if "state1" not in state:
        group = optimizer.param_groups[0]
        # It is looked up there, and with ZeRO-3 the groups are empty between steps.
        before, group["params"] = group["params"], [master]
        optimizer.init_state(group, master, 0, 0)
        group["params"] = before
    state[STEP] = int(step)
    for name, end in KINDS.items():
        held = state[f"state{end}"].view(-1)
        for start in range(0, len(held), CHUNK):
            part = held[start : start + CHUNK]
            found = values(name, start, len(part))
            if held.dtype == torch.uint8:
                found, scales = quantised(found, state[f"qmap{end}"].double().cpu())
                first = start // BLOCK
                state[f"absmax{end}"][first : first + len(scales)].copy_(scales)
            part.copy_(found)


def quantised(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes of values in blocks of 256, and each block's scale.

    The scale is that at which the value that is farthest from 0 has the code that is farthest on its side: 1, or with
    bitsandbytes' map −0.993 for a negative one.

    Args:
        values: ``[N]`` float64.
        code: ``[256]`` float64, ascending: the value that each code stands for at the scale 1.

    >>> code = torch.linspace(-1, 1, 256, dtype=torch.float64)
    >>> [part.tolist() for part in quantised(torch.tensor([0.5, -0.25], dtype=torch.float64), code)]
    [[255, 64], [0.5]]
    """
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    high, low = padded.amax(1), padded.amin(1)
    least = code[0] if code[0] < 0 else code[-1]
    scales = torch.maximum(high / code[-1], low / least if code[0] < 0 else high).float()
    # A farther value on the other side decides.
    divisors = torch.where(scales > 0, scales, 1.0).double()[:, None]
    codes = torch.bucketize(padded / divisors, (code[1:] + code[:-1]) / 2)
    return codes.to(torch.uint8).view(-1)[: len(values)], scales
