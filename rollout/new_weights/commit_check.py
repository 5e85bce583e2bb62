"""Checks each version of the weights that the engine has loaded, before its samples count.

Checksums show that the right bytes have arrived. Whether the engine also computes with them what the
learner would is tested with a few tokens:

- **given rows**: the engine scores the rows that the learner scored when it published the version.
  Finds swapped matrices, parts of an older version, another model.
- **samples**: the engine draws a few tokens after the same prompt as in every check, whose keys and
  values the prefix cache may still have from before, and then scores them as given ones. Finds cached
  keys of other weights, and log-probs that don't belong to the distribution that was sampled from.
- **samples that ran on**: if samples are under way when the weights change, four of the check's own
  are among them. Finds keys and values that should have been computed again.

The greatest difference, and for given rows also the mean one, is compared with bounds: in the first
check those of the dtype, later a multiple of what earlier checks found, since rounding differs
between models and kernels. The mean, which leaves out the greatest twentieth, shows a small fault
everywhere. The greatest difference shows a large fault in a few places; in half precision it must be
very large, because there a token whose logits depend on where the model looks moves far once in a few
hundred checks. Among samples the middle one counts: wrong keys or a wrong temperature show in each of
them, while rounding in bfloat16 now and then moves one token of one sample by more than any bound that
that would still find such faults.

An engine that can score only at temperature 1 cheaply (``scores_plain``) draws the check's samples at 1 too. A temperature
that it applies wrongly, and only then, is left to the learner's check of ratios, which sees the run's own samples.

The given rows are scored for every version. Samples are drawn for the first versions, and from then on
for as many as a fiftieth of the time allows: for each of them where an update takes half a minute, for
every tenth or so of a tiny model, whose updates follow one another within a tenth of a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import TandemError
from ...common.records import Float32Array, Sample, SamplingParams, Version
from ...common.weights.manifest import ScoredRows
from ..engine import Engine, GroupRequest, Scorer
from .rounding import (
    BOUNDS,
    GIVEN,
    LEFT_OUT,
    MEAN,
    RAN_ON,
    REMEMBERED,
    SAMPLED,
    Noise,
)

log = logging.getLogger("tandem.rollout")

SAMPLES, TOKENS = 3, 4
"""Number of samples drawn in a check, and of tokens in each. Finished groups wait until they are drawn."""
RUN_ON_SAMPLES = 4
"""Number of samples that are to run on."""
HOT = 2.0
"""Temperature of the samples that run on, unless the engine can score only at 1 cheaply: at the run's
temperature a trained model is so certain of its tokens that older keys make no difference to them."""
BLOCK = 16
"""Tokens per block of the prefix cache, unless the engine reports another number."""
STEPS_BEFORE, STEPS_AFTER = 2, TOKENS
"""Token steps of samples that are to run on, before the weights change and after."""
RUN_ON_SECONDS = 2.0
"""Longest wait for these steps."""
LONGEST_RUN_ON = 256
"""Greatest number of tokens in a row of the check."""
FIRST_CHECKS = 5
"""Number of checks that draw samples whatever they cost."""
SAMPLES_SHARE = 0.02
"""Share of the time that later checks with samples may take."""
LOOK_SECONDS = 0.001
LARGEST = 1e9
"""The number that is reported for an infinite difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The greatest difference among tokens of one kind."""

    kind: str
    """Kind of the tokens: given rows, samples, or samples that ran on."""
    size: float
    """Size in nats; infinite if one side isn't a number."""
    bound: float
    """Greatest size that passes."""
    where: str
    """Row, token and both figures, for a person."""
    mean: float
    """Mean over all tokens except the greatest twentieth, in nats."""
    mean_bound: float
    """Greatest mean that passes."""

    @property
    def nearness(self) -> float:
        """The greatest or mean difference in units of its bound; over 1 it can't be rounding."""
        return max(self.size / self.bound, self.mean / self.mean_bound)

    @property
    def passes(self) -> bool:
        """Whether it can be rounding."""
        return self.nearness <= 1.0

    def __str__(self) -> str:
        text = f"{self.kind}: {self.where}: {self.size:.4g} nats apart, where {self.bound:.2g} pass"
        if self.kind != GIVEN:
            return text
        return f"{text}; in the mean {self.mean:.4g}, where {self.mean_bound:.2g} pass"


@dataclass(slots=True)
class _RunOn:
    """Samples that were begun before the weights changed."""

    request: GroupRequest
    samples: asyncio.Task[tuple[Sample, ...]]


@dataclass(slots=True)
class CheckCounts:
    """Counters since the worker's start, and the results of the last check."""

    checks: int = 0
    """Number of checked versions, counting each load."""
    failures: int = 0
    """Number of checks that failed."""
    seconds: float = 0.0
    """Duration of the last check in seconds, from the end of the load."""
    last: tuple[Difference, ...] = field(default=())
    """Differences found by the last check."""
    alarm: str = ""
    """What the last failed check found; empty as long as none has failed."""


class CommitCheck:
    """Checks one engine; for use in one loop.

    Args:
        engine: the engine; it is checked only if it is a :class:`~..engine.Scorer`.
        dtypes: the learner's and the engine's; the less exact one counts.
        bound: bound of the first check; None = by the dtype, 0 = nothing is checked.
        temperature: temperature of the run's samples, and of the check's if the engine can score at it cheaply.
        runs_on: whether running samples continue with keys and values of the new weights.
        seconds: deadline of each request to the engine.
        longest: tokens of the run's longest row, prompt and response. The check's rows are no longer,
            since the model may have been tested only up to there.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        dtypes: Iterable[str],
        bound: float | None,
        temperature: float,
        runs_on: bool,
        seconds: float,
        longest: int = LONGEST_RUN_ON,
    ) -> None:
        self._engine: Any = engine
        # vLLM can't score a row without sampling one more token.
        self._longest = min(longest - 1, LONGEST_RUN_ON)
        self._temperature = {GIVEN: 1.0, SAMPLED: temperature, RAN_ON: HOT}
        if getattr(engine, "scores_plain", False):
            self._temperature = dict.fromkeys(self._temperature, 1.0)
        self._runs_on = runs_on
        self._seconds = seconds
        dtype = max(dtypes, key=lambda name: BOUNDS[GIVEN][name])
        first = bound or None
        given = Noise(GIVEN, dtype, first)
        self._noise = {
            GIVEN: given,
            MEAN: Noise(MEAN, dtype, first),
            SAMPLED: Noise(SAMPLED, dtype, first, given),
            RAN_ON: Noise(RAN_ON, dtype, first, given),
        }
        self._prompt: NDArray[np.int32] | None = None
        self._asked = 0
        self._running: _RunOn | None = None
        self._told: set[str] = set()
        self._nearness: deque[float] = deque(maxlen=REMEMBERED)
        self._least = float("inf")
        self._samples_due = 0.0
        self._settled = asyncio.Event()
        self._settled.set()
        self.counts = CheckCounts()
        self.unchecked: Version | None = None
        """The version whose check isn't over yet."""
        self.suspect = False
        """Whether the weights in use have failed their check."""
        self.in_a_row = 0
        """Number of checks that have failed since the last one that passed."""
        self.is_on = bound != 0
        """Whether versions are checked."""
        if self.is_on and not isinstance(engine, Scorer):
            self.is_on = False
            log.warning(
                f"new weights aren't checked: {type(engine).__name__} has no method `score` "
                f"(see tandem.rollout.engine.Scorer)"
            )

    def stats(self) -> dict[str, Any]:
        """Figures for the worker's report: counters; how near the recent checks came to their bounds at most
        (over 1, one failed); and the kind that came nearest in the last check, with its greatest
        difference and bound (nats)."""
        counts = self.counts
        last = max(counts.last, key=lambda found: found.nearness, default=None)
        nearness = max(self._nearness, default=0.0)
        return {
            "on": self.is_on,
            "checks": counts.checks,
            "failures": counts.failures,
            "seconds": counts.seconds,
            "suspect": self.suspect,
            "kind": last.kind if last else None,
            "nearness": min(nearness, LARGEST),
            "difference": last.size if last and last.size < float("inf") else None,
            "bound": last.bound if last else None,
        }

    # What waits for a check.

    async def settled(
        self, samples: Iterable[Sample] = (), versions: Iterable[Version] = ()
    ) -> None:
        """Returns when none of these samples has a token of a version whose check isn't over, and those of these
        versions are over."""
        spans = {(span.term, span.step) for sample in samples for span in sample.spans}
        spans |= {(version.term, version.step) for version in versions}
        while (version := self.unchecked) is not None:
            if (version.term, version.step) not in spans:
                return
            await self._settled.wait()

    def end(self, *, passed: bool | None) -> None:
        """Releases what waits: the check has passed or failed, or (None) there is none to make."""
        if passed is not None:
            self.suspect = not passed
            self.in_a_row = 0 if passed else self.in_a_row + 1
        self.unchecked = None
        self._settled.set()
        if self._running is not None:
            self._running.samples.cancel()
            self._running = None

    # Before the weights change.

    async def begin(self, version: Version) -> None:
        """Called just before a version is loaded: from here on, whatever has a token of it must wait. If
        samples are under way, starts some samples of the check's own as well."""
        self.unchecked = version
        self._settled.clear()
        if self._prompt is None or not (self._runs_on and self._draws_samples()):
            return
        if not self._engine.stats().running_rows:
            return
        # As long as allowed, since they are ended once the weights have changed.
        request = self._request(RAN_ON, RUN_ON_SAMPLES, tokens=self._longest)
        task = asyncio.create_task(self._sample(request))
        self._running = _RunOn(request, task)
        await self._steps(STEPS_BEFORE, task)

    async def _steps(self, count: int, task: asyncio.Task[Any]) -> None:
        """Returns after ``count`` token steps, or when the task is done."""
        until = time.monotonic() + RUN_ON_SECONDS
        wanted = self._engine.stats().decode_steps + count
        while not task.done() and self._engine.stats().decode_steps < wanted:
            if time.monotonic() > until:
                return
            await asyncio.sleep(LOOK_SECONDS)

    # After it.

    async def examine(self, version: Version, scored: ScoredRows | None) -> list[Difference]:
        """Differences for a version, given rows first; empty if the learner sent no figures.

        Raises:
            TandemError: the engine can't score given rows.
        """
        since = time.perf_counter()
        running, self._running = self._running, None
        try:
            if scored is None:
                self._tell_once("new weights aren't checked: the learner sends no figures for it")
                return []
            block = int(getattr(self._engine, "prefix_block", BLOCK))
            rows = [np.array(row, dtype=np.int32) for row in scored.rows]
            tokens = np.concatenate(rows)
            self._prompt = np.resize(tokens, max(1, min(block + 1, self._longest - TOKENS)))
            draws = running is not None or self._draws_samples()
            sampled, ran_on = await asyncio.gather(
                self._sampled(version) if draws else _none(), self._ran_on(version, running)
            )
            scores = await self._scores(
                {
                    GIVEN: rows,
                    SAMPLED: [row for row, *_ in sampled],
                    RAN_ON: [row for row, *_ in ran_on],
                }
            )
            expected = [np.array(some) for some in scored.logprobs]
            firsts = [1] * len(rows)
            differences = [
                self._greatest(GIVEN, rows, firsts, expected, scores[GIVEN], "learner's")
            ]
            for kind, samples in ((SAMPLED, sampled), (RAN_ON, ran_on)):
                if samples:
                    differences.append(self._recorded(kind, samples, scores[kind]))
        finally:
            if running is not None and not running.samples.done():
                running.samples.cancel()
        counts = self.counts
        counts.checks += 1
        counts.last = tuple(differences)
        counts.seconds = time.perf_counter() - since
        if draws:
            # The least one: an engine's first passes may take a hundred times as long.
            self._least = min(self._least, counts.seconds)
            self._samples_due = time.perf_counter() + self._least / SAMPLES_SHARE
        self._nearness.append(max(difference.nearness for difference in differences))
        if all(difference.passes for difference in differences):
            for difference in differences:
                self._noise[difference.kind].add(difference.size)
                if difference.kind == GIVEN:
                    self._noise[MEAN].add(difference.mean)
        else:
            counts.failures += 1
        return differences

    def _draws_samples(self) -> bool:
        first = self.counts.checks < FIRST_CHECKS or self.in_a_row > 0
        return first or time.perf_counter() >= self._samples_due

    async def _scores(
        self, rows: dict[str, list[NDArray[np.int32]]]
    ) -> dict[str, list[Float32Array]]:
        """Scores of the rows of each kind; those of one temperature are asked for together, since a small
        model's pass costs the same for a few rows as for twice as many."""
        kinds: dict[float, list[str]] = {}
        for kind in rows:
            # Greedy tokens have the log-probs of temperature 1.
            kinds.setdefault(self._temperature[kind] or 1.0, []).append(kind)
        found: dict[str, list[Float32Array]] = {}
        for temperature, some in kinds.items():
            every = [row for kind in some for row in rows[kind]]
            if not every:
                continue
            try:
                async with asyncio.timeout(self._seconds):
                    scores = iter(await self._engine.score(every, temperature))
            except TimeoutError:
                raise TandemError(
                    f"the engine didn't score {len(every)} rows in {self._seconds:.0f} s"
                ) from None
            for kind in some:
                found[kind] = list(islice(scores, len(rows[kind])))
        return found

    async def _sampled(self, version: Version) -> list[tuple[NDArray[np.int32], Sample, int, int]]:
        """Rows with their samples, and the range of tokens that are of this version."""
        request = self._request(SAMPLED, SAMPLES, tokens=TOKENS)
        try:
            async with asyncio.timeout(self._seconds):
                samples = await self._sample(request)
        except TimeoutError:
            self._tell_once(
                f"new weights are checked by given rows alone: the engine drew no samples for the "
                f"check in {self._seconds:.0f} s"
            )
            return []
        return _of_version(request, samples, version, crossing=False)

    async def _ran_on(
        self, version: Version, running: _RunOn | None
    ) -> list[tuple[NDArray[np.int32], Sample, int, int]]:
        if running is None:
            return []
        await self._steps(STEPS_AFTER, running.samples)
        try:
            async with asyncio.timeout(self._seconds):
                await self._engine.abort([running.request.group_id])
                samples = await running.samples
        except TimeoutError:
            return []
        return _of_version(running.request, samples, version, crossing=True)

    def _recorded(
        self,
        kind: str,
        samples: Sequence[tuple[NDArray[np.int32], Sample, int, int]],
        scores: Sequence[Float32Array],
    ) -> Difference:
        """Compares the recorded log-probs of samples with their scores; returns the difference of the middle
        sample, or of the lower one of the two in the middle."""
        rows = [row for row, *_ in samples]
        recorded = [sample.logprobs[start:end] for _, sample, start, end in samples]
        firsts = [len(row) - (end - start) for row, _, start, end in samples]
        each = [
            self._greatest(kind, [row], [first], [here], [there], "recorded")
            for row, first, here, there in zip(rows, firsts, recorded, scores, strict=True)
        ]
        return sorted(each, key=lambda difference: difference.size)[(len(each) - 1) // 2]

    def _greatest(
        self,
        kind: str,
        rows: Sequence[NDArray[np.int32]],
        firsts: Sequence[int],
        expected: Sequence[NDArray[Any]],
        found: Sequence[Float32Array],
        whose: str,
    ) -> Difference:
        """The difference over all tokens of the rows from the first one that counts."""
        worst, where, every = -1.0, "", []
        for number, (row, first, here, there) in enumerate(
            zip(rows, firsts, expected, found, strict=True)
        ):
            scored = np.asarray(there, dtype=np.float64)[first - 1 :]
            apart = np.abs(scored - here)
            apart[np.isnan(apart)] = np.inf
            every.append(apart)
            at = int(apart.argmax())
            if apart[at] > worst:
                worst = float(apart[at])
                where = (
                    f"row {number}, token {first + at} (id {row[first + at]}), {whose} "
                    f"{here[at]:.4f} and scored {scored[at]:.4f}"
                )
        counted = np.sort(np.concatenate(every))
        # For few tokens the mean says no more than the greatest difference.
        mean_bound = self._noise[MEAN].bound if kind == GIVEN else float("inf")
        return Difference(
            kind=kind,
            size=worst,
            bound=self._noise[kind].bound,
            where=where,
            mean=float(counted[: len(counted) - len(counted) // LEFT_OUT].mean()),
            mean_bound=mean_bound,
        )

    # Asking the engine.

    def _request(self, kind: str, count: int, *, tokens: int) -> GroupRequest:
        assert self._prompt is not None
        self._asked += 1
        return GroupRequest(
            group_id=f"check/{self._asked}",
            prompt_tokens=self._prompt,
            count=count,
            sampling=SamplingParams(
                temperature=self._temperature[kind], top_p=1.0, top_k=0, max_new_tokens=tokens
            ),
            seed=0,
            longest=max(1, self._longest - len(self._prompt)),
            urgent=True,
        )

    async def _sample(self, request: GroupRequest) -> tuple[Sample, ...]:
        async for group in self._engine.generate([request]):
            if group.error is not None:
                self._tell_once(f"a check of new weights drew no samples: {group.error}")
            return tuple(group.samples)
        return ()

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning(text)


async def _none() -> list[Any]:
    return []


def _of_version(
    request: GroupRequest, samples: Iterable[Sample], version: Version, *, crossing: bool
) -> list[tuple[NDArray[np.int32], Sample, int, int]]:
    """For each sample with tokens of a version: its row up to their end, the sample, their start and end.

    Args:
        request: the request of the samples.
        samples: samples with their spans.
        version: version of the tokens.
        crossing: only tokens that follow tokens of another version.
    """
    rows = []
    for sample in samples:
        for span in sample.spans:
            end = min(span.end, span.start + TOKENS)
            if (span.term, span.step) != (version.term, version.step) or end <= span.start:
                continue
            row = np.concatenate([request.prompt_tokens, sample.tokens[:end]]).astype(np.int32)
            if (span.start > 0) is crossing:
                rows.append((row, sample, span.start, end))
    return rows
