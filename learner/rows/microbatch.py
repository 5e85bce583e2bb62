"""A micro-batch: some rows, and their tokens laid out for one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .rows import Rows, ragged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Maps the F tokens of a line to ``[r, S]`` rows, padded on the right.

    The line has every prompt once, then every response, so that the rows of a group share its
    prompt (:mod:`tandem.learner.forward.shared_prompts`).
    """

    rows: int
    """Number of rows, r."""
    width: int
    """Width of the padded rows, S."""
    positions: Tensor
    """``[1, F]`` int64, the position of each token in its row."""
    gather: Tensor
    """``[r · S]`` int64, the token of the line that fills each cell; any token for padding."""
    back: Tensor
    """``[F]`` int64, the cell with each token's result; for a prompt's token, that of the first row."""

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
    """The input of one forward and backward pass."""

    input_ids: Tensor
    """``[r, S]`` int64, padded on the right with id 0; ``[1, F]`` with a layout."""
    index: Tensor
    """``[N]`` int64, position in the flattened ids of the token before each own or expert token;
    its hidden state predicts that token."""
    targets: Tensor
    """``[N]`` int64, the own and expert tokens."""
    temperature: Tensor | None
    """``[N]`` float32; None if all are 1."""
    rows: Rows
    """The rows, with the same N tokens, for the objective."""
    layout: Layout | None = None
    """The layout if rows share their prompts; None for padded rows."""

    @property
    def dummy(self) -> bool:
        """Whether it has no row: its loss counts nothing, and it only keeps collectives in step."""
        return not self.rows.count

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
        )


def micro_batch(rows: Rows, *, share_prompts: bool = False) -> MicroBatch:
    """The micro-batch of these rows; without rows, a dummy.

    Args:
        rows: all rows of the micro-batch.
        share_prompts: lay the tokens out so that rows of a group share their prompt.
    """
    if not rows.count:
        return dummy(rows)
    width = int(rows.forward_lengths.max())
    # The token at place t of a response is predicted at place P − 1 + t of its row.
    place = rows.by_token(rows.prompt_lengths) + rows.position
    index = rows.row * width + place - 1
    if share_prompts:
        line, layout = _shared(rows, width)
        input_ids, index = line[None], layout.gather[index]
    else:
        layout = None
        cells = ragged(torch.arange(rows.count) * width, rows.forward_lengths)
        input_ids = torch.zeros(rows.count * width, dtype=torch.int64)
        input_ids[cells] = rows.ids[ragged(rows.starts, rows.forward_lengths)]
        input_ids = input_ids.view(rows.count, width)
    plain = bool((rows.temperature == 1).all())
    return MicroBatch(
        input_ids=input_ids,
        index=index,
        targets=rows.ids[rows.by_token(rows.starts) + place],
        temperature=None if plain else rows.temperature,
        rows=rows,
        layout=layout,
    )


def _shared(rows: Rows, width: int) -> tuple[Tensor, Layout]:
    """The line of tokens, and its layout."""
    prompts, read = rows.prompt_lengths, rows.response_lengths - 1
    # The first row of each group carries its prompt.
    _, first, home = np.unique(rows.group.numpy(), return_index=True, return_inverse=True)
    carrier = torch.from_numpy(first)
    shared = prompts[carrier]
    at = shared.cumsum(0) - shared
    response_at = shared.sum() + read.cumsum(0) - read
    cells = torch.arange(rows.count) * width
    response_cells = ragged(cells + prompts, read)
    gather = torch.zeros(rows.count * width, dtype=torch.int64)
    gather[ragged(cells, prompts)] = ragged(at[torch.from_numpy(home)], prompts)
    gather[response_cells] = ragged(response_at, read)
    line = torch.cat([ragged(rows.starts[carrier], shared), ragged(rows.starts + prompts, read)])
    positions = torch.cat([ragged(torch.zeros_like(shared), shared), ragged(prompts, read)])
    layout = Layout(
        rows=rows.count,
        width=width,
        positions=positions[None],
        gather=gather,
        back=torch.cat([ragged(cells[carrier], shared), response_cells]),
    )
    return rows.ids[line], layout


def dummy(rows: Rows) -> MicroBatch:
    """One row of two tokens with valid ids, attached to the graph, whose loss counts nothing.

    Args:
        rows: any rows; none of them is in it.
    """
    return MicroBatch(
        input_ids=torch.zeros((1, 2), dtype=torch.int64),
        index=torch.zeros(1, dtype=torch.int64),
        targets=torch.zeros(1, dtype=torch.int64),
        temperature=None,
        rows=rows.select(torch.zeros(0, dtype=torch.int64)),
    )
