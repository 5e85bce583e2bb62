"""Compares a policy's log-probs and entropies with the model's own, on rows packed as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...common.agreement import Difference, Probe, ProbeRow, Scores
from ...common.config import Config
from ..rows.microbatch import LayoutName, MicroBatch, micro_batch
from ..rows.rows import Rows, ragged

Forward = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""Takes a micro-batch and returns ``[N]`` log-probs and ``[N]`` entropies."""


@torch.no_grad()
def difference(probe: Probe, forward: Forward, layout: LayoutName) -> Difference:
    """The difference between a way of scoring and the model's own scores, over all rows.

    The short rows are one micro-batch, and the long ones beside a short one are another.

    Args:
        probe: the model's probe.
        forward: the way of scoring.
        layout: how the rows are laid out.
    """
    short = [number for number, row in enumerate(probe.rows) if not row.long]
    long = [number for number, row in enumerate(probe.rows) if row.long]
    greatest = Difference()
    if not probe.rows:
        return greatest
    rows = _rows(probe.rows)
    for which in (short, [*short[:1], *long] if long else []):
        if not which:
            continue
        micro = micro_batch(rows.select(torch.tensor(which)), layout)
        logprobs, entropies = forward(micro)
        counts = [len(probe.rows[number].response) for number in which]
        parts = zip(which, logprobs.split(counts), entropies.split(counts), strict=True)
        for number, some, others in parts:
            scores = Scores(logprobs=some, entropies=others)
            greatest |= Difference.of(scores, probe.own[number], probe.rows[number])
    return greatest


def longest_row(config: Config) -> int:
    """Greatest number of tokens of prompt and response in a run's rows; traces have the same limit."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _rows(probe: Sequence[ProbeRow]) -> Rows:
    """The rows of a probe as if the policy had sampled them."""
    responses = torch.tensor([len(row.response) for row in probe])
    row = torch.repeat_interleave(responses)
    nothing, none = torch.zeros(len(probe)), torch.zeros(len(row))
    return Rows(
        ids=torch.from_numpy(np.concatenate([row.ids for row in probe])),
        prompt_lengths=torch.tensor([len(row.prompt) for row in probe]),
        response_lengths=responses,
        row=row,
        position=ragged(torch.zeros_like(responses), responses),
        expert=none.bool(),
        behaviour=none,
        known=none.bool(),
        lag=none.long(),
        temperature=torch.tensor([row.temperature for row in probe])[row],
        advantages=nothing,
        rewards=nothing,
        group=torch.tensor([row.group for row in probe]),
        expert_row=nothing.bool(),
        masked=nothing.bool(),
        silent=nothing.bool(),
        lengths=responses,
        turn=none.int(),
        muted=none.bool(),
        groups=len(probe),
    )
