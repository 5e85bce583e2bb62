"""A run's own past successes, which come back as rows of later groups (ExGRPO, Zhan et al. 2025, arXiv 2510.02245).

Of the first group of a problem in which some but not all samples were right, the right sample of least perplexity is
kept, as a trace with the log-probs with which it was sampled. It is a row of a later group of the problem with a
chance that depends on how many of the problem's samples were right the last time that any was: most if half of
them were. A problem whose samples were all right once gives it up for good. Nothing comes back until the policy is right
often enough.

Key, of a run:

==============  ====  =============================================================
``experience``  hash  problem id -> :class:`Known` as JSON; :data:`BEGUN` -> the step from which on successes come back
==============  ====  =============================================================

The trace of a problem never changes, so that a step that is trained again reads the same rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..common.errors import StoreError
from ..common.plain import damaged, read_json
from ..common.records import ExpertTrace, FinishReason, Group, Sample, Verdict
from ..common.seeds import keyed_seed
from .ledger_records import WAY_OUT
from .store import RunStore

BEGUN = ""
"""The hash's entry that says that successes come back; no problem has an empty id."""
SIGMA = 1.0
"""Standard deviation of the density of draws, in samples that were right, as in the published code."""


class Known(NamedTuple):
    """What is known of a problem."""

    right: int
    """Samples that were right, the last time that any was."""
    of: int
    """Samples with a verdict then."""
    trace: str
    """Id of the kept success; empty once all samples were right."""


def comes_back(known: Known, seed: int, group_id: str) -> bool:
    """Whether a problem's success is a row of a group, drawn by key.

    The chance is the normal density N(right; of/2, 1) over its greatest value for any number from 1 to ``of`` − 1
    (ExGRPO, section 3.2). There, half of a batch is drawn from all problems by these weights; here a problem comes in its
    turn, as in every run, and the weights decide whether its success comes with it.

    >>> comes_back(Known(right=4, of=8, trace="a/0#own"), 0, "0-0")
    True
    >>> comes_back(Known(right=8, of=8, trace=""), 0, "0-0")
    False
    """
    if not known.trace or known.of < 2:
        return False

    def density(right: int) -> float:
        return math.exp(-((right - known.of / 2) ** 2) / (2 * SIGMA**2))

    chance = density(known.right) / density(known.of // 2)
    return keyed_seed("experience", seed, group_id) / 2**64 < chance


def success_of(group: Group) -> tuple[int, int, Sample | None]:
    """Right samples, samples with a verdict, and the right one of least perplexity whose every token's log-prob is known."""
    graded = [sample for sample in group.samples if sample.has_verdict]
    right = [sample for sample in graded if sample.verdict is Verdict.CORRECT]
    ended = [
        sample
        for sample in right
        if sample.finish_reason is FinishReason.STOP and len(sample.tokens) and sample.is_own
    ]
    best = min(ended, key=lambda sample: -float(np.mean(sample.logprobs)), default=None)
    return len(right), len(graded), best


class Experience:
    """The successes of a run.

    Args:
        runs: the run's data in Redis.
    """

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self._key = runs.store.key("experience")

    def chosen(self, groups: Mapping[str, str], seed: int) -> dict[str, tuple[str, ...]]:
        """For some groups, by id, the success that is a row of each, if there is one.

        Args:
            groups: group id -> problem id.
            seed: the run's seed.
        """
        known, begun = self._read(list(dict.fromkeys(groups.values())))
        return {
            group_id: (known[problem].trace,)
            if begun and problem in known and comes_back(known[problem], seed, group_id)
            else ()
            for group_id, problem in groups.items()
        }

    def learn(self, step: int, groups: Sequence[Group], begins_at: float) -> None:
        """Takes in a step's groups; to do so again changes nothing, except that it stores what a full Redis had no
        memory for.

        Args:
            step: the step's number.
            groups: its groups.
            begins_at: share of right samples in a step from which on successes come back.

        Raises:
            FullError: Redis is full, which is told at once: it may be the caller who has to free memory.
        """
        if not groups:
            return
        known, begun = self._read(list(dict.fromkeys(group.problem_id for group in groups)))
        traces: list[ExpertTrace] = []
        fields: dict[str, str] = {}
        right_in_all = graded_in_all = 0
        for group in groups:
            right, graded, best = success_of(group)
            right_in_all += right
            graded_in_all += graded
            before = known.get(group.problem_id)
            if not right or (before is not None and not before.trace):
                continue
            if right == graded:
                now = Known(right, graded, "")
            elif before is not None:
                now = Known(right, graded, before.trace)
            elif best is not None:
                name = f"{group.problem_id}#own"
                traces.append(
                    # The tokenizer is the run's own.
                    ExpertTrace.of(
                        best, trace_id=name, problem_id=group.problem_id, tokenizer_digest=""
                    )
                )
                now = Known(right, graded, name)
            else:
                continue
            known[group.problem_id] = now
            fields[group.problem_id] = json.dumps(now)
        if not begun and graded_in_all and right_in_all >= begins_at * graded_in_all:
            fields[BEGUN] = str(step)
        # The traces first: what is named can be read.
        self._runs.put_traces(traces)
        if fields:
            flat = [word for field in fields.items() for word in field]
            self._runs.store.answers([("HSET", self._key, *flat)])

    def there(self, names: Iterable[str]) -> set[str]:
        """Those of some traces that Redis holds."""
        wanted = list(names)
        key = self._runs.store.key("traces")
        found = self._runs.store.batch([("HEXISTS", key, name) for name in wanted])
        return {name for name, held in zip(wanted, found, strict=True) if held == 1}

    def _read(self, problems: Sequence[str]) -> tuple[dict[str, Known], bool]:
        raw = self._runs.store.call("hmget", self._key, [BEGUN, *problems])
        found = zip(problems, raw[1:], strict=True)
        return {name: _known(name, data) for name, data in found if data is not None}, bool(raw[0])


def _known(name: str, data: bytes) -> Known:
    what = f"what is known of problem {name!r}"
    found = read_json(data, what, StoreError, WAY_OUT)
    kinds = [type(one) for one in found] if isinstance(found, list) else []
    if kinds != [int, int, str]:
        raise damaged(what, "isn't two counts and a trace's id", StoreError, WAY_OUT)
    return Known(*found)
