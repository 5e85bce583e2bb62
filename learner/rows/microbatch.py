"""A micro-batch: some rows, and their tokens laid out for one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .rows import Rows, ragged

LayoutName = Literal["padded", "shared", "packed"]
"""How the tokens of a micro-batch are laid out.

========  ==========================================================================================
padded    ``[r, S]``, each row padded on the right to the longest
shared    one line without padding: every prompt once, then every response (:class:`SharedLayout`)
packed    one line without padding: the rows one after the other (:class:`PackedLayout`)
========  ==========================================================================================
"""
WORTHWHILE = 0.94
"""Greatest share of the padded rows' tokens with which a line of shared prompts is used: it takes about 6% longer
per token, for what attention gathers and scatters (measured with 3M parameters, in rows of 128 tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedLayout:
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

    def to(self, device: torch.device) -> SharedLayout:
        """The same on another device."""
        return SharedLayout(
            rows=self.rows,
            width=self.width,
            positions=self.positions.to(device, non_blocking=True),
            gather=self.gather.to(device, non_blocking=True),
            back=self.back.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """Says where the rows on a line of F tokens begin and end (:mod:`tandem.learner.forward.packed`)."""

    lengths: tuple[int, ...]
    """Tokens of each of the r rows."""
    ends: Tensor
    """``[r + 1]`` int32, where each row begins, and at last F."""
    positions: Tensor
    """``[1, F]`` int64, the position of each token in its row."""

    def to(self, device: torch.device) -> PackedLayout:
        """The same on another device."""
        return PackedLayout(
            lengths=self.lengths,
            ends=self.ends.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
        )


Layout = SharedLayout | PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The input of one forward and backward pass."""

    input_ids: Tensor
    """``[r, S]`` int64, padded on the right with id 0; ``[1, F]`` with a layout, which has no padding."""
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
    """The layout of a line of tokens; None for padded rows."""

    @property
    def dummy(self) -> bool:
        """Whether it has no row: its loss counts nothing, and it only keeps collectives in step."""
        return not self.rows.count

    @property
    def layout_name(self) -> LayoutName:
        """The name of its layout."""
        if self.layout is None:
            return "padded"
        return "packed" if isinstance(self.layout, PackedLayout) else "shared"

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


def micro_batch(rows: Rows, layout: LayoutName = "padded") -> MicroBatch:
    """The micro-batch of these rows; without rows, a dummy.

    Args:
        rows: all rows of the micro-batch.
        layout: how their tokens are laid out. Rows that would share too little are padded.
    """
    if not rows.count:
        return dummy(rows)
    lengths = rows.forward_lengths
    width = int(lengths.max())
    # The token at place t of a response is predicted at place P − 1 + t of its row.
    place = rows.by_token(rows.prompt_lengths) + rows.position
    index = rows.row * width + place - 1
    arranged: Layout | None = None
    shared = _shared(rows, width) if layout == "shared" else None
    if shared is not None and len(shared[0]) <= WORTHWHILE * rows.count * width:
        line, arranged = shared
        input_ids, index = line[None], arranged.gather[index]
    elif layout == "packed":
        arranged = _packed(lengths)
        input_ids = rows.ids[ragged(rows.starts, lengths)][None]
        index = rows.by_token(arranged.ends[:-1].long()) + place - 1
    else:
        cells = ragged(torch.arange(rows.count) * width, lengths)
        input_ids = torch.zeros(rows.count * width, dtype=torch.int64)
        input_ids[cells] = rows.ids[ragged(rows.starts, lengths)]
        input_ids = input_ids.view(rows.count, width)
    plain = bool((rows.temperature == 1).all())
    return MicroBatch(
        input_ids=input_ids,
        index=index,
        targets=rows.ids[rows.by_token(rows.starts) + place],
        temperature=None if plain else rows.temperature,
        rows=rows,
        layout=arranged,
    )


def laid_out(micro: MicroBatch, layout: LayoutName) -> MicroBatch:
    """The micro-batch in this layout; itself if it has it, or is a dummy."""
    if micro.dummy or micro.layout_name == layout:
        return micro
    return micro_batch(micro.rows, layout)


def _packed(lengths: Tensor) -> PackedLayout:
    """The layout of rows with these lengths ``[r]``, one after the other."""
    ends = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    ends[1:] = lengths.cumsum(0)
    return PackedLayout(
        lengths=tuple(lengths.tolist()),
        ends=ends,
        positions=ragged(torch.zeros_like(lengths), lengths)[None],
    )


def _shared(rows: Rows, width: int) -> tuple[Tensor, SharedLayout]:
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
    layout = SharedLayout(
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
