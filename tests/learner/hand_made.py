"""Rows laid out by hand and by a seed, with every column that an objective may ask for."""

from __future__ import annotations

from typing import Any

import torch

from tandem.common.objectives.keys import Baseline
from tandem.learner.losses.advantages import advantages
from tandem.learner.objectives import Objective
from tandem.learner.rows.rows import Rows

F64 = torch.float64

# One prompt, two own rows and one expert row, four places (reference case of LUFFY's loss).
P = [[0.5, 0.4, 0.3, 0.2], [0.6, 0.1, 0.9, 0.5], [0.02, 0.3, 0.8, 0.05]]
OLD = [[0.4, 0.4, 0.45, 0.2], [0.6, 0.2, 0.6, 0.5], [0.02, 0.25, 0.8, 0.05]]
MASK = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
REWARDS = [0.0, 1.0, 1.0]
CONSTANT = 77.0
WIDTH = 11.0


def rows(
    row: torch.Tensor,
    expert: torch.Tensor,
    behaviour: torch.Tensor,
    row_advantages: torch.Tensor,
    **changes: Any,
) -> Rows:
    """Rows of these tokens; everything else as plain as it can be."""
    count = len(row_advantages)
    lengths = torch.bincount(row, minlength=count)
    values: dict[str, Any] = {
        # Prompts of one token.
        "ids": torch.zeros(count + len(row), dtype=torch.int64),
        "prompt_lengths": torch.ones(count, dtype=torch.int64),
        "response_lengths": lengths,
        "row": row,
        "expert": expert,
        "position": torch.zeros_like(row),
        "behaviour": behaviour,
        "known": ~expert,
        "lag": torch.zeros_like(row),
        "temperature": torch.ones(len(row)),
        "advantages": row_advantages,
        "rewards": torch.zeros(count, dtype=F64),
        "group": torch.zeros(count, dtype=torch.int64),
        "expert_row": torch.zeros(count, dtype=torch.bool),
        "masked": torch.zeros(count, dtype=torch.bool),
        "silent": torch.zeros(count, dtype=torch.bool),
        "lengths": lengths,
        "turn": torch.zeros(len(row), dtype=torch.int32),
        "muted": torch.zeros(len(row), dtype=torch.bool),
        "groups": 1,
    }
    return Rows(**(values | changes))


def reference_case(baseline: Baseline = "group_mean") -> tuple[Rows, torch.Tensor]:
    """The rows of LUFFY's worked example, and their log-probs as a leaf."""
    mask = torch.tensor(MASK).bool()
    row = torch.repeat_interleave(torch.arange(3), mask.sum(1))
    expert = row == 2
    logprobs = torch.tensor(P, dtype=F64).log()[mask].requires_grad_()
    # The published weight of an expert token doesn't use its old log-prob: π_φ = 1.
    behaviour = torch.where(expert, 0.0, torch.tensor(OLD, dtype=F64).log()[mask])
    group = torch.zeros(3, dtype=torch.int64)
    expert_row = torch.tensor([False, False, True])
    rewards = torch.tensor(REWARDS, dtype=F64)
    return rows(
        row,
        expert,
        behaviour,
        advantages(rewards, group, 1, expert_row, baseline),
        logprobs=logprobs,
        expert_row=expert_row,
        rewards=rewards,
    ), logprobs


def scalars_of(objective: Objective, these: Rows, constant: float = 4.0) -> dict[str, float]:
    """What the trainer hands to every loss of an update with these rows."""
    counted = {k: float(v) for k, v in objective.statistics(these).items()}
    return counted | {"constant": constant, "width": WIDTH, "step": 30.0}


def random_rows(
    seed: int, count: int = 12, *, group_size: int = 4, dtype: torch.dtype = F64
) -> Rows:
    """Groups with one expert row each but the first, some rows masked, all columns filled."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=rng)
    row = torch.repeat_interleave(torch.arange(count), lengths)
    total = int(lengths.sum())
    place = torch.arange(count)
    expert_row = (place % group_size == group_size - 1) & (place >= group_size)
    starts = lengths.cumsum(0) - lengths
    # Every other expert row is a prefix of the expert's with an own continuation.
    within = torch.arange(total) - starts[row]
    mixed = (place // group_size) % 2 == 1
    expert = expert_row[row] & (~mixed[row] | (within * 2 < lengths[row]))
    known = ~expert | ((row // group_size) % 3 == 1)

    def drawn(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(total, generator=rng, dtype=F64)

    logprobs = drawn(-3, 0)
    near = logprobs + drawn(-0.5, 0.5)
    made = rows(
        row,
        expert,
        torch.where(known, near, 0.0).to(dtype),
        torch.randn(count, generator=rng, dtype=F64),
        position=within,
        known=known,
        lag=torch.where(expert, -1, torch.randint(0, 3, (total,), generator=rng)),
        logprobs=logprobs.to(dtype),
        entropy=drawn(0, 2).to(dtype),
        proximal=(logprobs + drawn(-0.2, 0.2)).to(dtype),
        reference=(logprobs + drawn(-1, 1)).to(dtype),
        values=drawn(-1, 1).to(dtype),
        old_values=drawn(-1, 1).to(dtype),
        returns=drawn(-1, 1).to(dtype),
        rewards=torch.randint(0, 3, (count,), generator=rng).to(F64) / 2,
        expert_row=expert_row,
        masked=place % 5 == 4,
        group=place // group_size,
    )
    return made


def filled(objective: Objective, these: Rows, leaf: torch.Tensor | None = None) -> Rows:
    """The rows as the objective's declared columns say: what it doesn't ask for isn't there."""
    asked = objective.columns
    changes: dict[str, Any] = {}
    if leaf is not None:
        changes["logprobs"] = leaf
    if "proximal" not in asked:
        changes["proximal"] = None
    if "reference" not in asked:
        changes["reference"] = None
    if "divergence" in asked:
        # It comes out of the pass that scores the tokens; the loss must only be linear in it.
        there = these.logprobs if leaf is None else leaf
        assert there is not None
        changes["divergence"] = these.behaviour - there
    if "values" not in asked:
        changes |= {"values": None, "old_values": None, "returns": None}
    else:
        changes["token_advantages"] = these.returns
    return these.with_columns(**changes)
