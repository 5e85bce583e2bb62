"""From losses per token to one sum, with denominators that are global over an update.

The denominators are counted once over the whole update (before any correction mask) and passed
to every micro-batch. So the loss doesn't change with how the rows are split, and masking tokens
doesn't inflate the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...common.objectives.keys import Aggregation


def counts(row: Tensor, expert: Tensor, rows: int) -> dict[str, Tensor]:
    """Counts from which the denominators are made; additive over rows.

    Args:
        row: ``[N]`` int64, index of each token's row.
        expert: ``[N]`` bool, expert tokens.
        rows: number of rows, R.

    Returns:
        ``own_tokens``, ``expert_tokens`` and ``sequences`` (rows with at least one token),
        float64 scalars.
    """
    expert_tokens = expert.sum().to(torch.float64)
    length = torch.zeros(rows, dtype=torch.float64, device=row.device)
    length = length.index_add(0, row, torch.ones_like(row, dtype=torch.float64))
    return {
        "own_tokens": len(row) - expert_tokens,
        "expert_tokens": expert_tokens,
        "sequences": (length > 0).sum().to(torch.float64),
    }


def aggregate(
    losses: Tensor,
    *,
    row: Tensor,
    expert: Tensor,
    lengths: Tensor,
    how: Aggregation,
    scalars: Mapping[str, float],
) -> Tensor:
    """The contribution of these tokens to the update's loss.

    ``constant``: Σℓ / (longest response × nominal rows), Dr. GRPO's (arXiv 2503.20783).
    ``width``: Σℓ / longest response, without division by rows, as in LUFFY's code.
    ``token_mean``: Σℓ / tokens of the update (DAPO, arXiv 2503.14476). ``sequence_mean``: the
    mean over rows of each row's mean (GRPO, arXiv 2402.03300, eq. 3). ``by_source``: the own
    tokens' mean plus the expert tokens' mean.

    Args:
        losses: ``[N]`` loss per token, 0 where masked.
        row: ``[N]`` int64.
        expert: ``[N]`` bool.
        lengths: ``[R]`` own and expert tokens of each row, masked ones included.
        how: Which denominator.
        scalars: :func:`counts` of the whole update, and ``constant`` or ``width`` for those.
    """
    if how == "constant":
        return losses.sum() / scalars["constant"]
    if how == "width":
        return losses.sum() / scalars["width"]
    if how == "token_mean":
        tokens = scalars["own_tokens"] + scalars["expert_tokens"]
        return losses.sum() / max(tokens, 1.0)
    if how == "sequence_mean":
        per_token = lengths.clamp(min=1).to(losses.dtype)[row]
        return (losses / per_token).sum() / max(scalars["sequences"], 1.0)
    own_weight = losses.new_tensor(1.0 / max(scalars["own_tokens"], 1.0))
    expert_weight = losses.new_tensor(1.0 / max(scalars["expert_tokens"], 1.0))
    return (losses * torch.where(expert, expert_weight, own_weight)).sum()
