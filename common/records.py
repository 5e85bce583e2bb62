"""The records that travel between processes: problems, samples, groups and expert traces.

The life of a group::

    admitted -> leased -> graded -> taken(step) -> trained
                  |          |           |
                  +-> admitted (expired, returned)
                             +-> rejected(reason)

A record is plain data: NumPy arrays, strings and numbers. This module imports no deep-learning
library, so a grading host can use it. ``tandem.common.wire`` is the only place that
encodes records.

No field has a default, so that records on the wire, and the calls that make them, are complete.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .plain import Record

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]

Plain = Any
"""Free-form data: text, numbers, null, and lists and text-keyed maps of them, 8 levels deep."""
if not TYPE_CHECKING:
    _Scalar = str | int | float | bool | None
    Plain = _Scalar
    for _ in range(7):
        Plain = _Scalar | list[Plain] | dict[str, Plain]


@cache
def _arrays(cls: type) -> dict[str, np.dtype[Any]]:
    """The dtype of each array among a record's fields."""
    dtypes = {}
    for name, hint in typing.get_type_hints(cls).items():
        for kind in (hint, *typing.get_args(hint)):
            if typing.get_origin(kind) is np.ndarray:
                dtypes[name] = array_dtype(kind)
    return dtypes


@cache
def array_dtype(annotation: Any) -> np.dtype[Any]:
    """The little-endian dtype of ``NDArray[…]``."""
    scalar: type[np.generic] = typing.get_args(typing.get_args(annotation)[1])[0]
    return np.dtype(scalar).newbyteorder("<")


def _as_declared(record: Record) -> None:
    """Gives each array of a new record its declared dtype, if that loses nothing.

    Raises:
        ValueError: an array isn't one-dimensional, or has values that the dtype can't hold.
    """
    for name, dtype in _arrays(type(record)).items():
        value = getattr(record, name)
        if value is None or (
            type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1
        ):
            continue
        array, where = np.asarray(value), f"{type(record).__name__}.{name}"
        if array.ndim != 1:
            raise ValueError(f"{where} should be one-dimensional, and its shape is {array.shape}")
        if array.size and not _fits(array, dtype):
            raise ValueError(f"{where} holds {array.dtype} values that {dtype} can't hold")
        msgspec.structs.force_setattr(record, name, array.astype(dtype))


def _fits(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "f":
        return array.dtype.kind in "fiu"
    limits = np.iinfo(dtype)
    within = array.dtype.kind in "iu" and limits.min <= int(array.min())
    return within and int(array.max()) <= limits.max


ENVIRONMENT = "tandem.environment"
"""Key of ``extra`` under which a problem that is played in an environment has ``{"name": …, "row": {…}}``: the
environment's name, and the data set's whole row. Columns of data sets have other names."""
PROMPT_MESSAGES = "prompt_messages"
"""Key of ``extra`` under which a prompt's messages travel, in a run whose reward asks for them."""


REPEATS = "repeated_rows"
"""Key of ``extra`` under which a held-out problem whose row is repeated says how often."""


class Source(IntEnum):
    """Who wrote a token; loss masks follow from this."""

    OWN = 0
    """Sampled by the policy: enters the loss with the ratio to its behaviour log-prob."""
    EXPERT = 1
    """From another model's trace: enters the loss with the off-policy weight."""
    ENVIRONMENT = 2
    """Written by a tool, an environment or a user: context only, never in a loss or a denominator."""


_OF_TRACES = (Source.EXPERT.value, Source.ENVIRONMENT.value)


class Verdict(StrEnum):
    """The grader's verdict. Only ``correct`` is rewarded."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    GOLD_UNPARSABLE = "gold_unparsable"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    MEMORY = "memory"
    JUDGE_FAILED = "judge_failed"
    ENV_FAILED = "env_failed"
    """The episode's environment or agent broke, or gave no reward that can be used."""
    ENV_TIMEOUT = "env_timeout"
    """A step or the whole episode took longer than its deadline."""
    ENV_RESET = "env_reset"
    """The environment couldn't be reset, so that the episode never began."""

    @property
    def leaves_baseline(self) -> bool:
        """Whether the failure isn't the text's own, so that the row leaves the baseline instead of counting 0."""
        return self in _NOT_ITS_OWN


EPISODE_FAILURES = frozenset({Verdict.ENV_FAILED, Verdict.ENV_TIMEOUT, Verdict.ENV_RESET})
"""Verdicts of episodes that failed by no fault of the policy."""
_NOT_ITS_OWN = EPISODE_FAILURES | {
    Verdict.CRASHED,
    Verdict.GOLD_UNPARSABLE,
    Verdict.JUDGE_FAILED,
}


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """The model ended it."""
    LENGTH = "length"
    """It reached its maximum length."""
    ABORT = "abort"
    """The engine was asked to end it; no submitted sample has ended this way."""
    DEADLINE = "deadline"
    """It was still being sampled at its group's deadline: a straggler, with the tokens so far."""


class CommitResult(StrEnum):
    """The ledger's answer to a commit; all four are final, so nobody sends again."""

    COMMITTED = "committed"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"
    REJECTED = "rejected"


class Version(Record, frozen=True, kw_only=True, order=True):
    """A policy version: step n of a term means that n steps of the ledger were consumed.

    >>> Version(term=2, step=0) > Version(term=1, step=99)
    True
    """

    term: int
    """Number of the learner's start that made it: the fencing token, raised whenever a learner starts."""
    step: int
    """Number of steps consumed."""

    def __post_init__(self) -> None:
        if self.term < 0 or self.step < 0:
            raise ValueError(f"version {self} can't be: term and step count from 0")

    def __str__(self) -> str:
        return f"{self.term}.{self.step}"


class VersionSpan(Record, frozen=True, kw_only=True):
    """Tokens ``[start, end)`` of a sample's response were sampled by this version."""

    term: int
    step: int
    start: int
    """First token of the span, counted in the response."""
    end: int
    """One past its last token."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end or self.term < 0 or self.step < 0:
            raise ValueError(
                f"a span of tokens [{self.start}, {self.end}) by version {self.term}.{self.step} "
                f"can't be"
            )


class SamplingParams(Record, frozen=True, kw_only=True):
    """The distribution that a sample was drawn from; training needs it to form ratios."""

    temperature: float
    """Divides the logits; 0 means greedy (evaluation only)."""
    top_p: float
    """Share of the probability that is sampled from; anything under 1 is refused in training."""
    top_k: int
    """Number of most likely tokens that are kept; 0 keeps all. Anything else is refused in training."""
    max_new_tokens: int
    """Greatest number of tokens of a response, not counting its prefix."""

    def __post_init__(self) -> None:
        if not (
            0.0 <= self.temperature < math.inf
            and 0.0 < self.top_p <= 1.0
            and self.top_k >= 0
            and self.max_new_tokens >= 0
        ):
            raise ValueError(f"no tokens can be drawn with {self}")


class Turn(Record, frozen=True, kw_only=True):
    """One answer of the policy within an episode: tokens ``[start, end)`` of the sample, all of them own."""

    start: int
    """First token of the turn, counted in the response."""
    end: int
    """One past its last token."""
    reward: float | None
    """What the environment paid for this turn; None if it pays only whole episodes."""
    malformed: bool
    """Whether it holds a tool call that can't be parsed."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"a turn of tokens [{self.start}, {self.end}) can't be")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"a turn's reward of {self.reward} isn't finite")


class Episode(Record, frozen=True, kw_only=True):
    """What an environment says of the sample that was played in it."""

    environment: str
    """Name of the environment in the config."""
    reward: float | None
    """The reward of the whole episode, those of its turns included; None if it has none."""
    failure: Verdict | None
    """How it failed, one of :data:`EPISODE_FAILURES`; None if it was played to its end."""
    detail: str
    """Why it failed, or why it ended."""
    turns: tuple[Turn, ...]
    """The policy's turns, in order."""
    metrics: Mapping[str, float]
    """The environment's own figures, and Tandem's counts: ``tool_calls``, ``malformed_calls``, ``branches``,
    ``retokenised``, ``environment_seconds``, ``model_seconds``, ``episode_seconds``."""

    def __post_init__(self) -> None:
        if self.failure is not None and self.failure not in EPISODE_FAILURES:
            raise ValueError(f"{self.failure} isn't a way for an episode to fail")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"an episode's reward of {self.reward} isn't finite")


class Sample(Record, frozen=True, kw_only=True, eq=False, omit_defaults=True):
    """One response to a prompt, with everything that the loss needs to know about its origin.

    Example: a 3-token prefix of an expert's trace continued by the policy for 2 tokens::

        tokens = [11, 12, 13, 41, 2]
        source = [1, 1, 1, 0, 0]
        logprobs = [nan, nan, nan, -0.3, -0.1]
        spans = (VersionSpan(term=1, step=7, start=3, end=5),)
    """

    tokens: Int32Array
    """``[L]`` token ids of the response, including the end-of-sequence token if it came."""
    source: UInt8Array
    """``[L]`` a :class:`Source` per token."""
    logprobs: Float32Array
    """``[L]`` nats; behaviour log-prob of each own token under the sampling distribution; NaN
    if it isn't known (environment text, expert tokens without recorded log-probs)."""
    spans: tuple[VersionSpan, ...]
    """Which version sampled which tokens; empty if nothing was sampled."""
    finish_reason: FinishReason
    """Why it ended."""
    sampling: SamplingParams
    """The distribution that it was drawn from."""
    text: str
    """The decoded response without special tokens, as the grader reads it."""
    reward: float | None
    """The composed reward; None before grading, and if the row has no verdict to reward."""
    verdict: Verdict | None
    """The grader's verdict; None before grading."""
    components: Mapping[str, float | None]
    """Every reward component by name, unweighted, so that re-weighting needs no re-grading."""
    extracted: str | None
    """The answer that the grader extracted from the text."""
    grader: str | None
    """``name@version`` of the grader, so that samples can be graded again."""
    token_rewards: Float32Array | None = None
    """``[L]`` the part of ``reward`` that single tokens have earned along the way; the rest of it is for the
    whole response. None where all of it is."""
    episode: Episode | None = None
    """The episode that was played in an environment; ``text`` is then that of its last turn. None for a
    response to a prompt."""

    def __post_init__(self) -> None:
        _as_declared(self)
        length = len(self.tokens)
        if self.token_rewards is not None and len(self.token_rewards) != length:
            raise ValueError(
                f"a sample of {length} tokens has rewards of {len(self.token_rewards)} tokens"
            )
        if not (len(self.source) == len(self.logprobs) == length):
            raise ValueError(
                f"a sample's arrays differ in length: tokens {length}, source "
                f"{len(self.source)}, logprobs {len(self.logprobs)}"
            )
        # As an int: NumPy takes five times as long to compare its own with an IntEnum.
        if length and int(self.source.max()) > Source.ENVIRONMENT:
            raise ValueError(
                f"a sample has a token of source {self.source.max()}: there are "
                f"{', '.join(f'{s.value} ({s.name.lower()})' for s in Source)}"
            )
        for span in self.spans:
            if span.end > length:
                raise ValueError(f"a sample of {length} tokens has a span to its token {span.end}")
        for turn in self.episode.turns if self.episode is not None else ():
            if turn.end > length:
                raise ValueError(f"a sample of {length} tokens has a turn to its token {turn.end}")

    @property
    def is_own(self) -> bool:
        """Whether the policy sampled all of it, with a log-prob for every token."""
        return bool((self.source == Source.OWN).all() and np.isfinite(self.logprobs).all())

    @property
    def has_verdict(self) -> bool:
        """Whether it has a verdict to learn from. Without a reward it has none: no component that
        pays had anything to say of it."""
        verdict = self.verdict
        return verdict is not None and not verdict.leaves_baseline and self.reward is not None

    @property
    def oldest_step(self) -> int | None:
        """Step of the version that sampled the oldest own token; None without own tokens."""
        return min((s.step for s in self.spans if s.end > s.start), default=None)


class Problem(Record, frozen=True, kw_only=True, eq=False):
    """A prompt with a gold answer, rendered and tokenised once, at ingest."""

    problem_id: str
    """Stable within a run: ``<source name>/<row>``."""
    prompt_text: str
    """The rendered prompt."""
    prompt_tokens: Int32Array
    """``[P]`` token ids of the prompt."""
    gold: str
    """The gold answer as the data set states it."""
    data_source: str
    """The data set's own name for where the row is from."""
    ability: str
    """What the row exercises (math, code, …); picks the grader."""
    trace_ids: tuple[str, ...]
    """Expert traces of this problem, in ledger order."""
    extra: Mapping[str, Plain]
    """The data set's ``extra_info``."""

    def __post_init__(self) -> None:
        _as_declared(self)


class ExpertTrace(Record, frozen=True, kw_only=True, eq=False, omit_defaults=True):
    """A sample that another model wrote. Graded once, at ingest; never sent to an engine."""

    trace_id: str
    """Stable within a run: ``<problem id>#<k>``."""
    problem_id: str
    """The problem that it answers."""
    tokens: Int32Array
    """``[L]`` token ids of the response, ending in end-of-sequence."""
    logprobs: Float32Array | None
    """``[L]`` the expert's own log-probs, nats: known for all of a trace or for none."""
    text: str
    """The response as text."""
    tokenizer_digest: str
    """Digest of the tokenizer that made ``tokens``; for another tokenizer, tokenise again."""
    reward: float | None
    """The composed reward."""
    verdict: Verdict
    """Only ``correct`` traces enter by default."""
    components: Mapping[str, float | None]
    """Reward components by name."""
    grader: str | None
    """``name@version`` of the grader."""
    source: UInt8Array | None = None
    """``[L]`` a :class:`Source` per token, expert or environment: of a whole conversation, what users and tools
    wrote is context only; ``text`` is then that of its last answer. None = the expert wrote all of it."""

    def __post_init__(self) -> None:
        _as_declared(self)
        for name in ("logprobs", "source"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(
                    f"a trace's arrays differ in length: tokens {len(self.tokens)}, {name} "
                    f"{len(values)}"
                )
        if self.source is not None and not np.isin(self.source, _OF_TRACES).all():
            raise ValueError(
                f"a trace has tokens of sources {np.unique(self.source).tolist()}: they may be "
                f"{Source.EXPERT.value} (expert) and {Source.ENVIRONMENT.value} (environment)"
            )

    @classmethod
    def of(
        cls, sample: Sample, *, trace_id: str, problem_id: str, tokenizer_digest: str
    ) -> ExpertTrace:
        """The trace that a graded sample is for another step or run."""
        assert sample.verdict is not None
        return cls(
            trace_id=trace_id,
            problem_id=problem_id,
            tokens=sample.tokens,
            # Those of a prefix are another model's.
            logprobs=sample.logprobs if sample.is_own else None,
            text=sample.text,
            tokenizer_digest=tokenizer_digest,
            reward=sample.reward,
            verdict=sample.verdict,
            components=sample.components,
            grader=sample.grader,
        )


class Group(Record, frozen=True, kw_only=True, eq=False):
    """G responses to one problem: the unit that is leased, committed and trained.

    With ``n`` expert traces attached at admission, the policy is asked for ``G - n`` samples;
    the learner adds the traces when it takes the group. If traces enter only groups in which all
    samples failed, the policy is asked for G, and the ledger says at the take which samples give way.
    """

    group_id: str
    """``<pass>-<position>`` in the seeded permutation; see :mod:`tandem.replay.rules.order`."""
    attempt: int
    """Number of the lease of this id that made it, from 1."""
    worker: str
    """Member id of the rollout worker."""
    problem_id: str
    prompt_tokens: Int32Array
    """``[P]`` token ids of the prompt."""
    prompt_text: str
    gold: str
    data_source: str
    """Picks the grader's settings."""
    samples: tuple[Sample, ...]
    """The policy's own samples (some may begin with an expert's prefix)."""
    trace_ids: tuple[str, ...]
    """Expert traces that complete the group, or that may replace samples if all failed."""
    extra: Mapping[str, Plain]
    """The problem's ``extra``."""

    def __post_init__(self) -> None:
        _as_declared(self)
        if self.attempt < 0:
            raise ValueError(f"group {self.group_id} can't have attempt {self.attempt}")

    @classmethod
    def of(
        cls,
        problem: Problem,
        samples: tuple[Sample, ...],
        *,
        group_id: str,
        attempt: int,
        worker: str,
        trace_ids: tuple[str, ...],
    ) -> Group:
        """A group of samples of a problem, with all that the grader and the learner need to know about it."""
        return cls(
            group_id=group_id,
            attempt=attempt,
            worker=worker,
            problem_id=problem.problem_id,
            prompt_tokens=problem.prompt_tokens,
            prompt_text=problem.prompt_text,
            gold=problem.gold,
            data_source=problem.data_source,
            samples=samples,
            trace_ids=trace_ids,
            extra=problem.extra,
        )

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest own token in the group; None without own tokens."""
        spans = (span for sample in self.samples for span in sample.spans)
        return min((span.step for span in spans if span.end > span.start), default=None)


class GroupSubmission(Record, frozen=True, kw_only=True):
    """Rollout worker to reward pool: grade this group and commit it."""

    request_id: int
    """Assigned by the sender; the answer carries it."""
    group: Group
    """The ungraded group."""


class GroupReceipt(Record, frozen=True, kw_only=True):
    """Reward pool to rollout worker: the ledger's final word on a submitted group."""

    request_id: int
    """The submission's id."""
    group_id: str
    attempt: int
    result: CommitResult
    detail: str
    """Why it was rejected, if it was."""
