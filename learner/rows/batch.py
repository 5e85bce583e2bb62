"""From groups and expert traces to the rows of an update, as NumPy arrays without padding.

A batch's rows are in the order of its groups; a group's own samples come first, then its traces.
A row without a verdict leaves here: it is in no baseline, no loss and no denominator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import DataError
from ...common.records import (
    ExpertTrace,
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    Sample,
    Source,
    UInt8Array,
    Verdict,
)

GroupWithTraces = tuple[Group, Sequence[str]]
"""A group with the ids of the expert traces that fill it up."""
NO_LAG = -1
"""Lag of a token that no version sampled."""

# Looked up once: an enum's members are slow to reach, and this runs for every sample.
_OWN, _EXPERT = Source.OWN, Source.EXPERT
_STOP, _DEADLINE = FinishReason.STOP, FinishReason.DEADLINE
_NO_VERDICT = frozenset({None, *(v for v in Verdict if v.leaves_baseline)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One prompt with one response that has a verdict."""

    group: int
    """Index of its group in the batch."""
    prompt: Int32Array
    """``[P]``"""
    tokens: Int32Array
    """``[L]`` the response."""
    source: UInt8Array
    """``[L]``"""
    behaviour: Float32Array
    """``[L]`` nats, NaN where unknown."""
    steps: NDArray[np.int64]
    """``[L]`` step of the version that sampled a token; −1 where none did."""
    temperature: float
    """Of the sampling."""
    reward: float
    """The composed reward."""
    truncated: bool
    """Cut by length."""
    straggler: bool = False
    """Cut at its group's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """R rows of some groups, flat: S tokens of prompts and responses, T of responses."""

    groups: int
    """How many groups they are of; a group may have no row left."""
    group: NDArray[np.int64]
    """``[R]``"""
    tokens: NDArray[np.int64]
    """``[S]`` prompt and response of every row, one after the other."""
    start: NDArray[np.int64]
    """``[R]`` where a row begins in ``tokens``."""
    prompt_length: NDArray[np.int64]
    """``[R]``"""
    response_start: NDArray[np.int64]
    """``[R]`` where a row begins in the arrays over responses."""
    response_length: NDArray[np.int64]
    """``[R]``"""
    source: UInt8Array
    """``[T]``"""
    behaviour: Float32Array
    """``[T]`` nats, NaN where unknown."""
    steps: NDArray[np.int64]
    """``[T]``"""
    temperature: NDArray[np.float32]
    """``[R]``"""
    rewards: NDArray[np.float64]
    """``[R]``"""
    truncated: NDArray[np.bool_]
    """``[R]`` rows cut by length."""
    straggler: NDArray[np.bool_]
    """``[R]`` rows cut at their group's deadline."""
    expert_row: NDArray[np.bool_]
    """``[R]`` rows with at least one expert token."""
    left_out: int
    """Rows that were left out for want of a verdict or of behaviour log-probs."""

    def __len__(self) -> int:
        return len(self.group)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``[R]`` tokens that a forward pass of the row reads: all but the last."""
        return self.prompt_length + self.response_length - 1


def row_of_sample(sample: Sample, group: int, prompt: Int32Array) -> Row | None:
    """A row, or None where the sample has no verdict to learn from."""
    length = len(sample.tokens)
    if sample.verdict in _NO_VERDICT or sample.reward is None or not length:
        return None
    # Without its behaviour log-prob an own token has no ratio. The sum is finite in nearly
    # every case, and then each term is.
    finite = math.isfinite(float(sample.logprobs.sum()))
    if not finite and not np.isfinite(sample.logprobs[sample.source == _OWN]).all():
        return None
    spans = sample.spans
    whole = len(spans) == 1 and spans[0].start == 0 and spans[0].end == length
    steps = np.full(length, spans[0].step if whole else NO_LAG, np.int64)
    for span in () if whole else spans:
        steps[span.start : span.end] = span.step
    return Row(
        group=group,
        prompt=prompt,
        tokens=sample.tokens,
        source=sample.source,
        behaviour=sample.logprobs,
        steps=steps,
        temperature=sample.sampling.temperature,
        reward=sample.reward,
        truncated=sample.finish_reason not in (_STOP, _DEADLINE),
        straggler=sample.finish_reason is _DEADLINE,
    )


def row_of_trace(
    trace: ExpertTrace, group: int, prompt: Int32Array, temperature: float
) -> Row | None:
    """A row of expert tokens, or None where the trace has no verdict."""
    if trace.verdict in _NO_VERDICT or trace.reward is None or not len(trace.tokens):
        return None
    length = len(trace.tokens)
    known = trace.logprobs
    return Row(
        group=group,
        prompt=prompt,
        tokens=trace.tokens,
        source=np.full(length, _EXPERT, np.uint8),
        behaviour=np.full(length, np.nan, np.float32) if known is None else known,
        steps=np.full(length, NO_LAG, np.int64),
        temperature=temperature,
        reward=trace.reward,
        truncated=False,
    )


def build(
    groups: Sequence[tuple[Group, Sequence[str]]],
    traces: Mapping[str, ExpertTrace],
    *,
    temperature: float,
    stragglers: bool = True,
) -> Batch:
    """The batch of some groups.

    Args:
        groups: In the row's order, each with the ids of its traces as the row names them.
        traces: Every trace that is named, by id.
        temperature: At which expert tokens are scored: that of the rollouts.
        stragglers: Whether samples that were cut at their group's deadline are rows.

    Raises:
        DataError: a trace is missing, or a prompt is empty.
    """
    rows: list[Row | None] = []
    for index, (group, trace_ids) in enumerate(groups):
        if not len(group.prompt_tokens):
            raise DataError(
                f"problem {group.problem_id} has an empty prompt: the first token of a response "
                f"needs one before it"
            )
        rows += [
            row_of_sample(sample, index, group.prompt_tokens)
            if stragglers or sample.finish_reason is not _DEADLINE
            else None
            for sample in group.samples
        ]
        for trace_id in trace_ids:
            if trace_id not in traces:
                raise DataError(f"group {group.group_id} names trace {trace_id}, which is missing")
            rows.append(row_of_trace(traces[trace_id], index, group.prompt_tokens, temperature))
    return assemble([row for row in rows if row is not None], len(groups), rows.count(None))


def assemble(rows: Sequence[Row], groups: int, left_out: int = 0) -> Batch:
    """The batch of these rows."""

    def joined(parts: list[Any], dtype: Any) -> Any:
        return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)

    source = joined([row.source for row in rows], np.uint8)
    prompts = np.array([len(row.prompt) for row in rows], np.int64)
    responses = np.array([len(row.tokens) for row in rows], np.int64)
    both = prompts + responses
    response_start = np.cumsum(responses) - responses
    return Batch(
        groups=groups,
        group=np.array([row.group for row in rows], np.int64),
        tokens=joined([part for row in rows for part in (row.prompt, row.tokens)], np.int64),
        start=np.cumsum(both) - both,
        prompt_length=prompts,
        response_start=response_start,
        response_length=responses,
        source=source,
        behaviour=joined([row.behaviour for row in rows], np.float32),
        steps=joined([row.steps for row in rows], np.int64),
        temperature=np.array([row.temperature for row in rows], np.float32),
        rewards=np.array([row.reward for row in rows], np.float64),
        truncated=np.array([row.truncated for row in rows], np.bool_),
        straggler=np.array([row.straggler for row in rows], np.bool_),
        expert_row=np.logical_or.reduceat(source == _EXPERT, response_start)
        if len(rows)
        else np.zeros(0, np.bool_),
        left_out=left_out,
    )


def ragged(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[sum(lengths)]`` the indices ``start, start + 1, …`` of every span, one after the other.

    >>> ragged(np.array([4, 9]), np.array([2, 3])).tolist()
    [4, 5, 9, 10, 11]
    """
    ends = np.cumsum(lengths)
    offsets = np.repeat(starts - (ends - lengths), lengths)
    return np.asarray(offsets + np.arange(int(ends[-1]) if len(ends) else 0), dtype=np.int64)
