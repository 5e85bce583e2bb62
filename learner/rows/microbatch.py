"""A micro-batch as tensors: padded token ids for the forward pass, flat rows for the objective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.records import Source
from ..losses.advantages import Baseline, advantages
from ..objectives import Objective
from .batch import NO_LAG, Batch, ragged
from .rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Where the F tokens of the line stand in ``[r, S]`` rows, padded on the right."""

    rows: int
    """r."""
    width: int
    """S."""
    positions: Tensor
    """``[1, F]`` int64, the place of a token in its row."""
    gather: Tensor
    """``[r · S]`` int64, which token of the line fills a cell; any at padding."""
    back: Tensor
    """``[F]`` int64, the cell that holds a token's result: of its first row, for a prompt's."""

    def to(self, device: torch.device) -> Layout:
        """The same on another device."""
        return Layout(
            rows=self.rows,
            width=self.width,
            positions=self.positions.to(device, non_blocking=True),
            gather=self.gather.to(device, non_blocking=True),
            back=self.back.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """What one forward and backward pass takes."""

    input_ids: Tensor
    """``[r, S]`` int64, padded on the right with id 0; ``[1, F]`` with a layout."""
    index: Tensor
    """``[N]`` int64, where in the flattened ids the token before each own or expert token
    stands: its hidden state predicts that token."""
    targets: Tensor
    """``[N]`` int64, those tokens."""
    temperature: Tensor | None
    """``[N]`` float32; None where all are 1."""
    rows: Rows
    """The same N tokens, for the objective."""
    layout: Layout | None = None
    """Of rows that share their prompts; None for padded ones."""
    dummy: bool = False
    """Its loss counts nothing; it only keeps collectives in step."""

    @property
    def forward_tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        if device.type == "cpu":
            return self
        heat = self.temperature
        return MicroBatch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            index=self.index.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            temperature=None if heat is None else heat.to(device, non_blocking=True),
            rows=self.rows.to(device),
            layout=None if self.layout is None else self.layout.to(device),
            dummy=self.dummy,
        )


def rows_of(
    batch: Batch,
    *,
    step: int,
    baseline: Baseline,
    truncation: str,
    stragglers: str = "mask",
    objective: Objective,
) -> Rows:
    """All rows of a batch as tensors, their advantages computed.

    Args:
        batch: Whole groups.
        step: The step that it is trained in; the learner's weights are of step − 1.
        baseline: Of the advantages.
        truncation: ``wrong``: a truncated row counts as what its grade says. ``mask``: it is in
            the baseline and out of the loss. ``zero_advantage``: the same through A = 0.
        stragglers: The same of rows that were cut at their group's deadline.
        objective: Decides the temperature by source.
    """
    counted = np.flatnonzero(batch.source != Source.ENVIRONMENT)
    row = np.repeat(np.arange(len(batch)), batch.response_length)[counted]
    within = np.arange(len(batch.source)) - np.repeat(batch.response_start, batch.response_length)
    expert = batch.source[counted] == Source.EXPERT
    known = np.isfinite(batch.behaviour[counted])
    steps = batch.steps[counted]
    heat = batch.temperature[row]
    for source, which in (("own", ~expert), ("expert", expert)):
        if source in objective.plain_temperature:
            heat = np.where(which, np.float32(1), heat)
    group = torch.from_numpy(batch.group)
    rewards = torch.from_numpy(batch.rewards)
    expert_row = torch.from_numpy(batch.expert_row)
    lengths = torch.from_numpy(np.bincount(row, minlength=len(batch)).astype(np.int64))
    given = advantages(rewards, group, batch.groups, expert_row, baseline, lengths)
    masked = _cut("mask", batch, truncation, stragglers)
    given = _without_cut(given, batch, truncation, stragglers)
    return Rows(
        row=torch.from_numpy(row.astype(np.int64)),
        expert=torch.from_numpy(expert),
        position=torch.from_numpy(within[counted].astype(np.int64)),
        behaviour=torch.from_numpy(np.where(known, batch.behaviour[counted], np.float32(0))),
        known=torch.from_numpy(known),
        lag=torch.from_numpy(np.where(steps == NO_LAG, NO_LAG, step - 1 - steps)),
        temperature=torch.from_numpy(heat),
        advantages=given,
        rewards=rewards,
        group=group,
        expert_row=expert_row,
        masked=masked,
        lengths=lengths,
    )


def penalised(
    rows: Rows,
    batch: Batch,
    penalties: Tensor,
    *,
    baseline: Baseline,
    truncation: str,
    stragglers: str = "mask",
) -> Rows:
    """The rows with the advantages of ``R − penalty``.

    ``rewards`` stay what the graders gave.

    Args:
        rows: Of :func:`rows_of`.
        batch: What they are of.
        penalties: ``[R]``
        baseline: Of the advantages.
        truncation: See :func:`rows_of`.
        stragglers: See :func:`rows_of`.
    """
    given = advantages(
        rows.rewards - penalties,
        rows.group,
        batch.groups,
        rows.expert_row,
        baseline,
        rows.lengths,
    )
    return rows.with_columns(advantages=_without_cut(given, batch, truncation, stragglers))


def _cut(how: str, batch: Batch, truncation: str, stragglers: str) -> Tensor:
    """``[R]`` bool: rows that were cut, by length or at a deadline, and are to be treated so."""
    found = np.zeros(len(batch), np.bool_)
    if truncation == how:
        found |= batch.truncated
    if stragglers == how:
        found |= batch.straggler
    return torch.from_numpy(found)


def _without_cut(given: Tensor, batch: Batch, truncation: str, stragglers: str) -> Tensor:
    silent = _cut("zero_advantage", batch, truncation, stragglers)
    return torch.where(silent, torch.zeros_like(given), given)


def micro_batch(
    batch: Batch, rows: Rows, which: NDArray[np.int64], *, share_prompts: bool = False
) -> MicroBatch:
    """The micro-batch of the rows with these indices.

    Args:
        batch: All rows.
        rows: The same as tensors.
        which: ``[r]``; none make a dummy.
        share_prompts: Lay the tokens out so that rows of a group share their prompt.
    """
    if not len(which):
        return dummy(rows)
    lengths = batch.lengths[which]
    width = int(lengths.max())
    cells = ragged(np.arange(len(which)) * width, lengths)
    tokens = batch.tokens[ragged(batch.start[which], lengths)]
    spans = ragged(batch.response_start[which], batch.response_length[which])
    # The token at place t of a response is predicted at place P − 1 + t of the row.
    before = np.arange(len(which)) * width + batch.prompt_length[which] - 1
    index = ragged(before, batch.response_length[which])
    answers = ragged(batch.start[which] + batch.prompt_length[which], batch.response_length[which])
    targets = batch.tokens[answers]
    counted = batch.source[spans] != Source.ENVIRONMENT
    if not counted.all():
        index, targets = index[counted], targets[counted]
    chosen = rows.select(torch.from_numpy(which))
    plain = bool((chosen.temperature == 1).all())
    layout = None
    if share_prompts:
        line, layout, place = _share(batch, which, width)
        input_ids, index = line[None], place[index]
    else:
        input_ids = np.zeros((len(which), width), np.int64)
        input_ids.reshape(-1)[cells] = tokens
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        index=torch.from_numpy(index),
        targets=torch.from_numpy(targets),
        temperature=None if plain else chosen.temperature,
        rows=chosen,
        layout=layout,
    )


def _share(
    batch: Batch, which: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int64], Layout, NDArray[np.int64]]:
    """The line of tokens, its layout, and ``[r · S]`` which of its tokens fills each cell."""
    prompts = batch.prompt_length[which]
    read = batch.response_length[which] - 1
    # The first row of each group carries its prompt.
    _, first, home = np.unique(batch.group[which], return_index=True, return_inverse=True)
    shared = prompts[first]
    starts = np.cumsum(shared) - shared
    total = int(shared.sum())
    response_at = total + np.cumsum(read) - read
    rows = np.arange(len(which)) * width
    line = batch.tokens[
        np.concatenate(
            [
                ragged(batch.start[which][first], shared),
                ragged(batch.start[which] + prompts, read),
            ]
        )
    ]
    place = np.zeros(len(which) * width, np.int64)
    place[ragged(rows, prompts)] = ragged(starts[home], prompts)
    own = ragged(rows + prompts, read)
    place[own] = ragged(response_at, read)
    positions = np.concatenate([ragged(np.zeros_like(shared), shared), ragged(prompts, read)])
    layout = Layout(
        rows=len(which),
        width=width,
        positions=torch.from_numpy(positions[None]),
        gather=torch.from_numpy(place),
        back=torch.from_numpy(np.concatenate([ragged(rows[first], shared), own])),
    )
    return line, layout, place


def dummy(rows: Rows) -> MicroBatch:
    """One row of two tokens with valid ids, attached to the graph, whose loss counts nothing."""
    one = rows.select(torch.zeros(0, dtype=torch.int64))
    return MicroBatch(
        input_ids=torch.zeros((1, 2), dtype=torch.int64),
        index=torch.zeros(1, dtype=torch.int64),
        targets=torch.zeros(1, dtype=torch.int64),
        temperature=None,
        rows=one,
        dummy=True,
    )
