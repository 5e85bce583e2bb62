"""Micro-batches: rows sorted by length, cut by a budget of tokens, equal in number.

Every rank derives the same plan from the same batch. A unit of the objective (row, pair or
group) is never split. Ranks with fewer micro-batches than others get empty ones, which the trainer
runs as dummies, since a collective that one rank doesn't enter hangs the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...common.errors import ConfigError

Plan = list[list[NDArray[np.int64]]]
"""``plan[rank][micro-batch]`` is an array of row indices; empty for a dummy."""


def plan(
    lengths: NDArray[np.int64],
    units: NDArray[np.int64],
    *,
    budget: int,
    ranks: int = 1,
    packed: bool = False,
) -> Plan:
    """Distributes rows over ranks and cuts each rank's rows into micro-batches.

    Args:
        lengths: ``[R]`` tokens that a row's forward pass reads.
        units: ``[R]`` number of each row's unit; rows of a unit stay together.
        budget: greatest number of tokens in a micro-batch, padding (rows × longest row) included.
        ranks: number of ranks.
        packed: whether rows are packed, so that there is no padding.

    Returns:
        The same number of micro-batches for every rank, longest rows first; none if there are no
        rows.

    Raises:
        ConfigError: a single unit is over the budget.
    """
    if not len(lengths):
        return [[] for _ in range(ranks)]
    # Sorted by the unit's longest row; the stable sort keeps ties in the batch's order.
    _, inverse = np.unique(units, return_inverse=True)
    longest = np.zeros(int(inverse.max()) + 1, np.int64)
    np.maximum.at(longest, inverse, lengths)
    order = np.lexsort((np.arange(len(lengths)), inverse, -longest[inverse]))
    members: list[list[int]] = []
    last = -1
    for row in order.tolist():
        if inverse[row] != last:
            members.append([])
            last = int(inverse[row])
        members[-1].append(row)
    dealt = _deal(members, lengths, ranks)
    cut = [(_fill if packed else _cut)(mine, lengths, budget) for mine in dealt]
    most = max(len(mine) for mine in cut)
    return [mine + [np.zeros(0, np.int64)] * (most - len(mine)) for mine in cut]


def _deal(
    members: Sequence[list[int]], lengths: NDArray[np.int64], ranks: int
) -> list[list[list[int]]]:
    """Gives each unit to the rank with the fewest tokens so far, longest units first."""
    if ranks == 1:
        return [list(members)]
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for unit in members:
        rank = min(range(ranks), key=lambda r: (load[r], r))
        dealt[rank].append(unit)
        load[rank] += int(lengths[unit].sum())
    return dealt


def _cut(
    members: Sequence[list[int]], lengths: NDArray[np.int64], budget: int
) -> list[NDArray[np.int64]]:
    found: list[list[int]] = []
    widest = 0
    for unit in members:
        width = int(lengths[unit].max())
        _require(unit, len(unit) * width, budget)
        widest = max(widest, width) if found else width
        if not found or (len(found[-1]) + len(unit)) * widest > budget:
            found.append([])
            widest = width
        found[-1] += unit
    return [np.array(rows, np.int64) for rows in found]


def _fill(
    members: Sequence[list[int]], lengths: NDArray[np.int64], budget: int
) -> list[NDArray[np.int64]]:
    """Gives each unit to the first micro-batch that has room for it (first fit, longest units first)."""
    found: list[list[int]] = []
    room: list[int] = []
    for unit in members:
        size = int(lengths[unit].sum())
        _require(unit, size, budget)
        place = next((number for number, left in enumerate(room) if left >= size), len(found))
        if place == len(found):
            found.append([])
            room.append(budget)
        found[place] += unit
        room[place] -= size
    return [np.array(rows, np.int64) for rows in found]


def _require(unit: list[int], size: int, budget: int) -> None:
    if size <= budget:
        return
    what = "the longest sample" if len(unit) == 1 else f"one unit of {len(unit)} rows"
    raise ConfigError(
        f"learner.micro_batch_tokens={budget} is less than {what} ({size:,} tokens): raise it to at "
        f"least {size:,}, or lower rollout.max_new_tokens"
    )
