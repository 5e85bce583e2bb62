"""Holds a policy's log-probs and entropies against the model's own, on rows packed as in training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...common.agreement import Difference, Probe, ProbeRow, Scores
from ...common.config import Config
from ...common.records import Source
from ..objectives import ObjectiveSettings, make
from ..rows.batch import NO_LAG, Row, assemble
from ..rows.microbatch import MicroBatch, micro_batch, rows_of

Forward = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""``[N]`` log-probs and ``[N]`` entropies of a micro-batch."""


@torch.no_grad()
def difference(probe: Probe, forward: Forward, *, share_prompts: bool) -> Difference:
    """Between a way of scoring and the model's own, over all rows.

    The short rows are a micro-batch, and the long ones beside a short one are another.

    Args:
        probe: Of the model.
        forward: The way of scoring.
        share_prompts: How the rows are laid out.
    """
    short = [number for number, row in enumerate(probe.rows) if not row.long]
    long = [number for number, row in enumerate(probe.rows) if row.long]
    batch = assemble([_row(row) for row in probe.rows], len(probe.rows))
    rows = rows_of(
        batch,
        step=1,
        baseline="none",
        truncation="wrong",
        objective=make("reinforce", ObjectiveSettings()),
    )
    found = Difference()
    for which in (short, [*short[:1], *long] if long else []):
        if not which:
            continue
        micro = micro_batch(batch, rows, np.array(which), share_prompts=share_prompts)
        logprobs, entropies = forward(micro)
        counts = [len(probe.rows[number].response) for number in which]
        parts = zip(which, logprobs.split(counts), entropies.split(counts), strict=True)
        for number, some, others in parts:
            scores = Scores(logprobs=some, entropies=others)
            found |= Difference.of(scores, probe.own[number], probe.rows[number])
    return found


def longest_row(config: Config) -> int:
    """Most tokens of prompt and response of a run's rows; a trace's response has the same limit."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _row(row: ProbeRow) -> Row:
    count = len(row.response)
    return Row(
        group=row.group,
        prompt=row.prompt.astype(np.int32),
        tokens=row.response.astype(np.int32),
        source=np.full(count, Source.OWN, np.uint8),
        behaviour=np.zeros(count, np.float32),
        steps=np.full(count, NO_LAG, np.int64),
        temperature=row.temperature,
        reward=0.0,
        truncated=False,
    )
