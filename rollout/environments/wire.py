"""The frames of verifiers' EnvServer protocol, which both its servers and ours speak.

A client's DEALER sends ``[request id, method, map]`` and gets ``[request id, kind, map]``: any number of
``delta`` while an episode is played, then exactly one ``reply``. Maps are MessagePack. The methods are
``health``, ``run`` and ``cancel``.

**A failed episode comes back as** ``success: true`` **with a reward of 0.0**, so :class:`Reading` looks at
``ok``, ``errors`` and ``stop_condition`` before it looks at any reward. Our own servers answer in the same
shape; what verifiers has no word for travels where it has room for it: rewards of turns in the trace's
``info``, and a verdict as the ``type`` of an error.

Fields that are unknown here are passed over: verifiers' records have many more, and the tokens that its
deltas carry aren't trained (the worker's endpoint has recorded them as they were sampled).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...common.errors import WireError
from ...common.plain import read_message
from ...common.printable import printable
from ...common.records import EPISODE_FAILURES, Verdict
from .pipes import MOST_METRICS
from .requests import read_id

MAX_ANSWER_BYTES = 64 << 20
"""Longest delta or reply that a client reads; verifiers' carry an episode's tokens."""
MAX_DELTAS = 100_000
"""Greatest number of deltas of one episode."""
DETAIL_CHARACTERS = 500
"""Length to which the words about an episode's end are cut."""
LEAVING = "server_leaving"
"""The error with which a server that is leaving hands an episode back, to be played elsewhere."""
LOST = "server_lost: "
"""Begins the error with which a server that stays hands an episode back, to be played again anywhere; then comes why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of one episode."""

    reward: float | None
    """The reward of the whole episode, those of its turns included; None if it has none."""
    turn_rewards: tuple[float | None, ...]
    """Rewards by number of the session's request; there may be fewer than requests."""
    failure: Verdict | None
    """One of :data:`~tandem.common.records.EPISODE_FAILURES`; None if it was played to its end."""
    detail: str
    """Why it failed, or why it ended."""
    metrics: Mapping[str, float]
    """The environment's own figures."""
    seconds: float
    """Time spent in the environment, in which the model wasn't waited for."""


def failed(verdict: Verdict, detail: str, seconds: float = 0.0) -> Played:
    """An episode that failed."""
    return Played(
        reward=None,
        turn_rewards=(),
        failure=verdict,
        detail=brief(detail),
        metrics={},
        seconds=seconds,
    )


def brief(text: str) -> str:
    """A text of another process as one line of bounded length, without control characters."""
    line = " ".join(printable(text[: 4 * DETAIL_CHARACTERS]).split())
    return line if len(line) <= DETAIL_CHARACTERS else f"{line[: DETAIL_CHARACTERS - 1]}…"


# --- answers ---------------------------------------------------------------------------------


class EpisodeError(Struct, frozen=True, kw_only=True):
    """One error of an episode."""

    type: str
    message: str = ""


class RewardEntry(Struct, frozen=True, kw_only=True):
    """One named reward."""

    score: float
    weight: float = 1.0


class Span(Struct, frozen=True, kw_only=True):
    """Wall-clock times, seconds."""

    start: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        """Length of the interval in seconds; 0 if it never ended."""
        length = self.end - self.start if self.end else 0.0
        return length if math.isfinite(length) and length > 0 else 0.0


class Split(Struct, frozen=True, kw_only=True):
    """A measured duration, seconds."""

    duration: float = 0.0


class AgentSpan(Span, frozen=True, kw_only=True):
    """The time in which the policy played, of which ``model`` was spent waiting for it."""

    model: Split = Split()


class Timing(Struct, frozen=True, kw_only=True):
    """Where an episode's time went."""

    boot: Span = Span()
    setup: Span = Span()
    agent: AgentSpan = AgentSpan()
    finalize: Span = Span()
    scoring: Span = Span()

    @property
    def environment_seconds(self) -> float:
        """All of it but the waiting for the model."""
        spans = (self.boot, self.setup, self.agent, self.finalize, self.scoring)
        model = self.agent.model.duration
        return max(0.0, sum(s.seconds for s in spans) - (model if math.isfinite(model) else 0.0))


class Info(Struct, frozen=True, kw_only=True):
    """What our servers say in a trace's ``info``."""

    turn_rewards: list[float | None] = []


class Changes(Struct, frozen=True, kw_only=True):
    """``set`` of a delta: the fields of a trace that have changed."""

    rewards: dict[str, RewardEntry | None] | UnsetType = UNSET
    metrics: dict[str, float | None] | UnsetType = UNSET
    info: Info | UnsetType = UNSET
    ok: bool | UnsetType = UNSET
    stop_condition: str | UnsetType | None = UNSET
    is_timeout: bool | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET


class Delta(Struct, frozen=True, kw_only=True):
    """What has changed in one trace."""

    trace: str
    open: Any = UNSET
    """The trace's head, once."""
    nodes: list[msgspec.Raw] = []
    calls: list[msgspec.Raw] = []
    errors: list[EpisodeError] = []
    set: Changes = Changes()
    discard: bool = False
    """Whether the trace was of an attempt that was given up."""


class Head(Struct, frozen=True, kw_only=True):
    """An episode without its traces."""

    ok: bool = False
    is_timeout: bool = False
    errors: list[EpisodeError] = []


class TraceSummary(Struct, frozen=True, kw_only=True):
    """How long a trace is, so that a lost delta is noticed."""

    id: str
    nodes: int
    calls: int


class Reply(Struct, frozen=True, kw_only=True):
    """The end of a request."""

    success: bool
    error: str | None = None
    head: Head | None = None
    traces: list[TraceSummary] = []
    cancelled: bool = False
    """Whether a cancel found its episode."""


Kind = Literal["delta", "reply"]


def read_answer(frames: Sequence[bytes]) -> tuple[str, Kind, bytes]:
    """Reads the frames of an answer: the request's id, the kind, and the map, which isn't read yet.

    Raises:
        WireError: they aren't an answer's.
    """
    if len(frames) != 3:
        raise WireError(
            f"refused an answer of {len(frames)} frames: there should be 3 (verifiers before 0.4 sends 2)"
        )
    name, kind, data = frames
    if kind not in (b"delta", b"reply"):
        raise WireError(f"refused an answer of the kind {bytes(kind[:40])!r}")
    if len(data) > MAX_ANSWER_BYTES:
        raise WireError(f"refused an answer of {len(data):,} bytes: over {MAX_ANSWER_BYTES:,}")
    return read_id(name), "delta" if kind == b"delta" else "reply", data


def read_delta(data: bytes) -> Delta:
    """Reads the map of a delta."""
    found: Delta = read_message(Delta, data, "delta of an episode")
    return found


def read_reply(data: bytes) -> Reply:
    """Reads the map of a reply."""
    found: Reply = read_message(Reply, data, "reply of an environment server")
    return found


@dataclass(slots=True)
class _Trace:
    """One trace, as far as its deltas have come."""

    rewards: Mapping[str, RewardEntry | None] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    info: Info = field(default_factory=Info)
    ok: bool = False
    stop_condition: str | None = None
    is_timeout: bool = False
    timing: Timing = field(default_factory=Timing)
    errors: list[EpisodeError] = field(default_factory=list)
    nodes: int = 0
    calls: int = 0

    def apply(self, delta: Delta) -> None:
        self.nodes += len(delta.nodes)
        self.calls += len(delta.calls)
        self.errors += delta.errors[-8:]
        for name in Changes.__struct_fields__:
            value = getattr(delta.set, name)
            if value is not UNSET:
                setattr(self, name, value)


class Reading:
    """Reads one episode as its deltas come in."""

    def __init__(self) -> None:
        self._traces: dict[str, _Trace] = {}
        self._deltas = 0

    def add(self, data: bytes) -> None:
        """Reads one delta.

        Raises:
            WireError: it isn't a valid one.
        """
        delta = read_delta(data)
        self._deltas += 1
        if self._deltas > MAX_DELTAS:
            raise WireError(f"refused an episode of over {MAX_DELTAS:,} deltas")
        if delta.discard:
            self._traces.pop(delta.trace, None)
            return
        if delta.trace not in self._traces and delta.open is UNSET:
            raise WireError(
                f"refused a delta of the trace {delta.trace[:40]!r}, which wasn't opened"
            )
        self._traces.setdefault(delta.trace, _Trace()).apply(delta)

    def finish(self, data: bytes) -> Played:
        """Reads the reply.

        Raises:
            WireError: it isn't a valid one, or deltas are missing.
        """
        reply = read_reply(data)
        if not reply.success or reply.head is None:
            return failed(Verdict.ENV_FAILED, reply.error or "the server gave no reason")
        traces = []
        for summary in reply.traces:
            trace = self._traces.get(summary.id)
            if trace is None or (trace.nodes, trace.calls) != (summary.nodes, summary.calls):
                raise WireError(
                    f"refused an episode whose trace {summary.id[:40]!r} is incomplete: a delta was lost"
                )
            traces.append(trace)
        if (failure := _failure(reply.head, traces)) is not None:
            return failure
        if len(traces) != 1:
            return failed(
                Verdict.ENV_FAILED,
                f"the episode has the traces of {len(traces)} agents, and one can be trained",
            )
        return _read_trace(traces[0])


def result_of(deltas: Iterable[bytes], reply: bytes) -> Played:
    """Reads the maps of an episode's deltas and of its reply.

    Raises:
        WireError: they aren't valid.
    """
    reading = Reading()
    for delta in deltas:
        reading.add(delta)
    return reading.finish(reply)


def _failure(head: Head, traces: Sequence[_Trace]) -> Played | None:
    """How the episode failed, if it did."""
    seconds = sum(trace.timing.environment_seconds for trace in traces)
    stops = [trace.stop_condition or "" for trace in traces]
    errors = [*(e for trace in traces for e in trace.errors), *head.errors]
    late = head.is_timeout or any(trace.is_timeout for trace in traces)
    broke = any(stop == "error" or stop.endswith("_error") for stop in stops)
    if head.ok and not head.errors and not late and not broke and all(t.ok for t in traces):
        return None
    verdict = Verdict.ENV_TIMEOUT if late else Verdict.ENV_FAILED
    stop = next(filter(None, stops), "nothing that it names")
    detail = f"the episode isn't ok: it was stopped by {stop}"
    if errors:
        last = errors[-1]
        verdict = _VERDICTS.get(last.type, verdict)
        detail = last.message if last.type in _VERDICTS else f"{last.type}: {last.message}"
    return failed(verdict, detail, seconds)


_VERDICTS = {verdict.value: verdict for verdict in EPISODE_FAILURES}


def _read_trace(trace: _Trace) -> Played:
    """The rewards and figures of a trace that was played to its end."""
    seconds = trace.timing.environment_seconds
    paid = [entry.score * entry.weight for entry in trace.rewards.values() if entry is not None]
    turns = tuple(trace.info.turn_rewards)
    reward = sum(paid) if paid else None
    for number in (reward, *turns):
        if number is not None and not math.isfinite(number):
            return failed(Verdict.ENV_FAILED, f"a reward of {number} isn't finite", seconds)
    return Played(
        reward=reward,
        turn_rewards=turns,
        failure=None,
        detail=brief(trace.stop_condition or ""),
        metrics=_figures(trace.metrics),
        seconds=seconds,
    )


def _figures(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The first of an environment's figures that are numbers, with names of bounded length."""
    found = {
        printable(name[:100]): value
        for name, value in metrics.items()
        if value is not None and math.isfinite(value)
    }
    return dict(list(found.items())[:MOST_METRICS])


# --- what our servers answer -----------------------------------------------------------------


def opened(trace: str, environment: str) -> bytes:
    """The delta that says that an episode has got a place and begins."""
    return msgspec.msgpack.encode(
        {"trace": trace, "open": {"id": trace, "task": {"type": environment}}}
    )


def played_delta(trace: str, played: Played) -> bytes:
    """The delta with all that there is to say about a finished episode."""
    rewards = {} if played.reward is None else {"reward": {"score": played.reward, "weight": 1.0}}
    timing = {"agent": {"start": 1.0, "end": 1.0 + played.seconds}}
    changes = {
        "rewards": rewards,
        "metrics": dict(played.metrics),
        "info": {"turn_rewards": list(played.turn_rewards)},
        "ok": played.failure is None,
        "is_completed": True,
        "is_timeout": played.failure is Verdict.ENV_TIMEOUT,
        "stop_condition": "error" if played.failure else played.detail,
        "timing": timing,
    }
    errors = [_error(played)] if played.failure else []
    return msgspec.msgpack.encode({"trace": trace, "errors": errors, "set": changes})


def played_reply(trace: str, environment: str, played: Played) -> bytes:
    """The reply to the request of a finished episode, whatever became of it."""
    head = {
        "id": trace,
        "env": {"id": environment},
        "ok": played.failure is None,
        "is_timeout": played.failure is Verdict.ENV_TIMEOUT,
        "errors": [_error(played)] if played.failure else [],
    }
    traces = [{"id": trace, "nodes": 0, "calls": 0}]
    return msgspec.msgpack.encode({"success": True, "error": None, "head": head, "traces": traces})


def _error(played: Played) -> dict[str, str]:
    return {"type": played.failure.value if played.failure else "", "message": played.detail}


def done_reply(**more: bool) -> bytes:
    """The reply to a request that has been done."""
    return msgspec.msgpack.encode({"success": True, "error": None, **more})


def refused_reply(error: str) -> bytes:
    """The reply to a request that can't be done."""
    return msgspec.msgpack.encode({"success": False, "error": brief(error)})


def lost_reply(why: str = "") -> bytes:
    """The reply to the request of an episode that a server hands back, because it is leaving or for the reason that
    is given."""
    return refused_reply(LOST + why if why else LEAVING)


def why_lost(data: bytes) -> str | None:
    """Why a reply hands the episode back: empty if its server is leaving; None if the reply doesn't.

    Raises:
        WireError: it isn't a valid reply.
    """
    reply = read_reply(data)
    error = "" if reply.success or reply.error is None else reply.error
    if error == LEAVING:
        return ""
    return error.removeprefix(LOST) if error.startswith(LOST) else None
