"""From the groups of a step to its rows.

Rows are in the order of their groups; a group's own samples come first, then its traces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.errors import DataError
from ...common.objectives.keys import Baseline
from ...common.records import (
    ExpertTrace,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Source,
)
from .rows import Rows, ragged

NO_LAG = -1
"""Lag of a token that no version sampled."""

# Looked up once: an enum's members are slow to access, and this runs for every sample.
_OWN, _EXPERT, _ENVIRONMENT = Source.OWN, Source.EXPERT, Source.ENVIRONMENT
_STOP, _DEADLINE = FinishReason.STOP, FinishReason.DEADLINE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedGroup:
    """A group of a step with the expert traces that are rows beside its own samples."""

    group: Group
    """The group from the ledger; its samples are the own rows."""
    traces: tuple[ExpertTrace, ...] = ()
    """The traces that are its expert rows."""
    replaced: tuple[Sample, ...] = ()
    """Own samples that the traces have replaced; they are reported but not trained on."""
    later: int = 0
    """The step that trains on it, less the step of the run that sampled it, which its spans count by: 0 but for an
    archive's groups."""


def rows_of(
    groups: Sequence[MixedGroup],
    *,
    step: int,
    temperature: float,
    baseline: Baseline,
    truncation: str = "wrong",
    stragglers: str = "mask",
    plain_temperature: Collection[str] = (),
    mask_malformed: bool = False,
) -> Rows:
    """The rows of a step.

    A sample without a verdict, or without the behaviour log-prob of an own token, isn't a row: it is
    in no baseline, no loss and no denominator.

    Args:
        groups: all groups of the step in order, since some baselines whiten over the whole batch.
        step: the step that trains on them; the learner's weights are of ``step − 1``.
        temperature: temperature at which expert tokens are scored: that of the rollouts.
        baseline: baseline of the advantages.
        truncation: what happens to rows that were cut by length. ``wrong``: they count as graded.
            ``mask``: they are in the baseline and out of the loss. ``zero_advantage``: the same
            through A = 0.
        stragglers: the same for rows that were cut at their group's deadline; or ``leave_out``:
            they aren't rows.
        mask_malformed: whether turns with a malformed call stay out of the loss.
        plain_temperature: sources (``own``, ``expert``) whose tokens are scored at temperature 1.

    Raises:
        DataError: a prompt is empty.
    """
    members = [
        (number, mixed.group.prompt_tokens, sample)
        for number, mixed in enumerate(groups)
        for sample in _samples(mixed, temperature)
        if _is_row(sample) and not (stragglers == "leave_out" and _is_late(sample))
    ]
    samples = [sample for _, _, sample in members]
    count = len(members)
    prompts = _integers(len(prompt) for _, prompt, _ in members)
    responses = _integers(len(sample.tokens) for sample in samples)
    source = _joined([sample.source for sample in samples], np.uint8)
    counted = np.flatnonzero(source != _ENVIRONMENT)
    row = np.repeat(np.arange(count), responses)[counted]
    position = ragged(torch.zeros(count, dtype=torch.int64), torch.from_numpy(responses))[counted]
    expert = source[counted] == _EXPERT
    behaviour = _joined([sample.logprobs for sample in samples], np.float32)[counted]
    known = np.isfinite(behaviour)
    heat = np.array([sample.sampling.temperature for sample in samples], np.float32)[row]
    for name, which in (("own", ~expert), ("expert", expert)):
        if name in plain_temperature:
            heat = np.where(which, np.float32(1), heat)
    late = np.array([_is_late(sample) for sample in samples], np.bool_)
    cut = np.array([sample.finish_reason is not _STOP for sample in samples], np.bool_) & ~late

    def treated(how: str) -> NDArray[np.bool_]:
        return (cut & (truncation == how)) | (late & (stragglers == how))

    columns = {
        "ids": _joined([part for _, p, s in members for part in (p, s.tokens)], np.int64),
        "prompt_lengths": prompts,
        "response_lengths": responses,
        "row": row,
        "expert": expert,
        "behaviour": np.where(known, behaviour, np.float32(0)),
        "known": known,
        "lag": _joined(
            [_lags(sample, step - 1 - groups[number].later) for number, _, sample in members],
            np.int64,
        )[counted],
        "temperature": heat,
        "rewards": np.array([sample.reward for sample in samples], np.float64),
        "token_rewards": _token_rewards(samples, responses, source),
        "group": _integers(number for number, _, _ in members),
        "expert_row": np.bincount(row[expert], minlength=count) > 0,
        "masked": treated("mask"),
        "silent": treated("zero_advantage"),
        "lengths": np.bincount(row, minlength=count).astype(np.int64),
        "turn": _joined([_turns(sample) for sample in samples], np.int32)[counted],
        "muted": _joined([_malformed(sample, mask_malformed) for sample in samples], np.bool_)[
            counted
        ],
    }
    rows = Rows(
        **{name: torch.from_numpy(column) for name, column in columns.items()},
        position=position,
        advantages=torch.zeros(count, dtype=torch.float64),
        groups=len(groups),
    )
    return rows.with_advantages(rows.rewards, baseline)


def _samples(mixed: MixedGroup, temperature: float) -> Iterator[Sample]:
    """A group's own samples, then its traces as samples that another model wrote."""
    if not len(mixed.group.prompt_tokens):
        raise DataError(
            f"problem {mixed.group.problem_id} has an empty prompt: the first token of a response "
            f"needs one before it"
        )
    yield from mixed.group.samples
    sampling = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, max_new_tokens=0)
    for trace in mixed.traces:
        length = len(trace.tokens)
        unknown = np.full(length, np.nan, np.float32)
        yield Sample(
            tokens=trace.tokens,
            source=np.full(length, _EXPERT, np.uint8) if trace.source is None else trace.source,
            logprobs=unknown if trace.logprobs is None else trace.logprobs,
            spans=(),
            finish_reason=_STOP,
            sampling=sampling,
            text=trace.text,
            reward=trace.reward,
            verdict=trace.verdict,
            components=trace.components,
            extracted=None,
            grader=trace.grader,
        )


def _is_row(sample: Sample) -> bool:
    if not sample.has_verdict or not len(sample.tokens):
        return False
    # Without its behaviour log-prob an own token has no ratio. The sum is nearly always finite,
    # and then so is each term.
    return math.isfinite(float(sample.logprobs.sum())) or bool(
        np.isfinite(sample.logprobs[sample.source == _OWN]).all()
    )


def _is_late(sample: Sample) -> bool:
    return sample.finish_reason is _DEADLINE


def _lags(sample: Sample, newest: int) -> NDArray[np.int64]:
    """``[L]`` steps between the version that sampled each token and the one of step ``newest``; −1 for tokens that
    none sampled."""
    lags = np.full(len(sample.tokens), NO_LAG, np.int64)
    for span in sample.spans:
        lags[span.start : span.end] = newest - span.step
    return lags


def _turns(sample: Sample) -> NDArray[np.int32]:
    """``[L]`` number of the turn that each token is of, or comes before; that of the last turn after it."""
    turns = np.zeros(len(sample.tokens), np.int32)
    for turn in sample.episode.turns[:-1] if sample.episode is not None else ():
        turns[turn.end :] += 1
    return turns


def _malformed(sample: Sample, is_masked: bool) -> NDArray[np.bool_]:
    """``[L]`` whether each token is of a turn that stays out of the loss."""
    muted = np.zeros(len(sample.tokens), np.bool_)
    for turn in sample.episode.turns if is_masked and sample.episode is not None else ():
        muted[turn.start : turn.end] = turn.malformed
    return muted


def _token_rewards(
    samples: Sequence[Sample], lengths: NDArray[np.int64], source: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """``[N]`` what each own and expert token has earned; what environment text has earned goes to the last
    such token before it in its row, or else to the row's first one."""
    counted = source != _ENVIRONMENT
    result = np.zeros(int(counted.sum()))
    if all(sample.token_rewards is None for sample in samples):
        return result
    earned = [
        np.zeros(len(sample.tokens)) if sample.token_rewards is None else sample.token_rewards
        for sample in samples
    ]
    row = np.repeat(np.arange(len(samples)), lengths)
    ends = np.cumsum(np.bincount(row[counted], minlength=len(samples)))
    first = np.concatenate([[0], ends[:-1]])[row]
    place = np.maximum(np.cumsum(counted) - 1, first)
    # A row of environment text alone has no token that could have earned anything.
    there = first < ends[row]
    np.add.at(result, place[there], np.concatenate(earned)[there])
    return result


def _integers(values: Iterator[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
