"""Advantages, returns and rewards of single tokens, for training with a critic.

Tokens are flat, ``[N]``, in the order of their rows. Environment text isn't among them, so that a step
of GAE goes from an own token to the next own token, whatever text is in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_FLOOR = 1e-8
"""Added to the variance that :func:`whitened` divides by."""


def gae(
    rewards: Tensor,
    values: Tensor,
    row: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and the returns that a critic learns (arXiv 1506.02438, eq. 16).

    ``δ_t = r_t + γ V_{t+1} − V_t``, ``A_t = δ_t + γ λ A_{t+1}``, return ``A_t + V_t``. After a
    row's last token V is 0, or ``bootstrap`` where the row was cut and would have gone on. A run gives none:
    as in TRL and verl, a response that was cut ends there.

    Example: rewards [0, 0, 1], values [.5, .6, .7], γ = 1, λ = 1 gives A = [.5, .4, .3].

    Args:
        rewards: ``[N]`` reward of every token; the verdict's reward is at a row's last token.
        values: ``[N]`` V of the state before each token; no gradient goes through.
        row: ``[N]`` int64, index of each token's row, ascending.
        gamma: γ.
        lam: λ.
        bootstrap: ``[R]`` V after the last token of cut rows, 0 for ended ones; None = all ended.
            A row number above its length counts as ended.

    Returns:
        ``[N]`` advantages, ``[N]`` returns, detached, in the dtype of the values.
    """
    values = values.detach()
    result = torch.zeros_like(values)
    if not len(row):
        return result, result.clone()
    # One step for each place from the end, for all rows at once.
    rows = int(row.max()) + 1
    lengths = torch.bincount(row, minlength=rows)
    ends = lengths.cumsum(0)
    after = torch.zeros(rows, dtype=values.dtype, device=values.device)
    if bootstrap is not None:
        known = min(rows, len(bootstrap))
        after[:known] = bootstrap.detach()[:known].to(values.dtype)
    running = torch.zeros_like(after)
    for back in range(1, int(lengths.max()) + 1):
        alive = torch.nonzero(lengths >= back).squeeze(1)
        at = ends[alive] - back
        delta = rewards[at].to(values.dtype) + gamma * after[alive] - values[at]
        running[alive] = delta + gamma * lam * running[alive]
        result[at] = running[alive]
        after[alive] = values[at]
    return result, result + values


def last_token_rewards(row_rewards: Tensor, row: Tensor) -> Tensor:
    """``[N]`` each row's reward at its last token, 0 elsewhere."""
    lengths = torch.bincount(row, minlength=len(row_rewards))
    places = (lengths.cumsum(0) - 1)[lengths > 0]
    result = torch.zeros(len(row), dtype=row_rewards.dtype, device=row_rewards.device)
    result[places] = row_rewards[lengths > 0]
    return result


def whitened(values: Tensor, counted: Tensor, *, shift_mean: bool = True) -> Tensor:
    """``(x − mean) / √(variance + 1e-8)`` with the mean and the unbiased variance of the values that count,
    as PPO's code does with the advantages of a whole batch, and TRL's with rewards, whose mean stays.

    Fewer than two values that count have no variance, and all values stay as they are.

    Args:
        values: ``[N]``
        counted: ``[N]`` bool.
        shift_mean: False keeps the mean where it was.
    """
    among = values[counted]
    if len(among) < 2:
        return values
    mean = among.mean()
    result = (values - mean) * (among.var() + WHITEN_FLOOR).rsqrt()
    return result if shift_mean else result + mean


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """``1 − Var(G − V) / Var(G)``: 1 for a critic that knows every return, 0 for one that knows their mean; 0
    if all returns are equal."""
    if len(returns) < 2 or not float(returns.var()):
        return 0.0
    return 1.0 - float((returns - values).var() / returns.var())
