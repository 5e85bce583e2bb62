"""How a run stands at one moment: the one record that the live view and ``tandem status`` tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .history import Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Groups on their way, and what else is outstanding."""

    returned: int = 0
    """Leased before and free again."""
    leased: int = 0
    """With a worker."""
    submitted: int = 0
    """Finished by a worker that awaits a pool's receipt."""
    grading: int = 0
    """In the hands of a pool."""
    graded: int = 0
    """Ready for a batch."""
    taken: int = 0
    """In the batch that is trained on."""
    evaluations: int = 0
    """Evaluations asked for and not done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Age, in steps, of what was trained on lately."""

    mean: float | None = None
    """Over the recent steps."""
    max: float | None = None
    """Of the recent steps."""
    limit: int | None = None
    """``replay.max_staleness``."""
    shares: tuple[float, ...] = ()
    """Share of the samples by age, from 0 on; the ninth also holds the older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStanding:
    """All members of a role."""

    role: str
    """learner, rollout or reward."""
    members: int
    """How many were heard of."""
    idle: float | None
    """Share of their recent time that they waited."""
    waits_for: str
    """Whom they wait for most: a role, ``redis`` or ``graders``; empty where they are busy."""
    waits_what: str
    """For what of them, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStanding:
    """One process."""

    member: str
    """Its id."""
    role: str
    """learner, rollout or reward."""
    age: float
    """Seconds since its last heartbeat, by Redis."""
    pid: int | None
    """Process id, on its host."""
    host: str | None
    """Where it runs."""
    version: tuple[int, int] | None
    """(term, step) of the weights that it holds; None where it holds none."""
    idle: float | None
    """Share of its recent time that it waited."""
    waiting_for: str
    """As it tells it itself; empty where it doesn't wait, or doesn't say."""
    tokens_per_second: float | None
    """Sampled, by its last report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """All reward pools together, since their starts where it doesn't say otherwise."""

    samples: int
    """Graded."""
    verdicts: Mapping[str, int]
    """Of them, by verdict."""
    to_process: int
    """Answers that a grader process compared."""
    cached: int
    """Answers that took the verdict of an equal one."""
    queued: int
    """Requests that wait for a process now."""
    queue_wait: float
    """Mean seconds that a request waited for a process."""
    seconds: float
    """Mean seconds of a request in its process."""
    hang_share: float
    """Of the last minute's requests, of the worst pool."""
    crash_share: float
    """Likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment. Figures that nobody has told yet are None or empty."""

    time: float
    """Of this snapshot, seconds since the epoch."""
    run: str
    """Its folder, or the join file."""
    preset: str | None = None
    """That it was started with."""
    state: str | None = None
    """starting, running, draining, finished, failed or stopped."""
    supervisor: int | None = None
    """Process id of its ``tandem start``."""
    elapsed_seconds: float | None = None
    """In all its lives."""
    step: int = 0
    """The latest that was trained."""
    total_steps: int | None = None
    """Of the run, where it is known."""
    seconds_per_step: float | None = None
    """Lately."""
    seconds_left: float | None = None
    """At that pace."""
    reward: float | None = None
    """Mean of the latest step."""
    rewards: tuple[float, ...] = ()
    """Means of the recent steps, oldest first."""
    loss: float | None = None
    """Of the latest step."""
    zero_variance: float | None = None
    """Share of the recent groups without a signal."""
    response_length: float | None = None
    """Mean of the recent responses, tokens."""
    entropy: float | None = None
    """Of the policy on its own recent tokens, nats a token."""
    evaluations: tuple[Evaluated, ...] = ()
    """All of them, by step."""
    tokens_sampled_per_second: float | None = None
    """All workers together, by their last reports."""
    tokens_trained_per_second: float | None = None
    """Lately, expert tokens included."""
    samples_trained_per_second: float | None = None
    """Lately, expert rows included."""
    ledger: Mapping[str, int] = field(default_factory=dict)
    """Groups by state."""
    queues: Queues = Queues()
    """Groups on their way."""
    staleness: Staleness = Staleness()
    """Of what was trained on lately."""
    roles: tuple[RoleStanding, ...] = ()
    """Who is busy and who waits."""
    members: tuple[MemberStanding, ...] = ()
    """Every process that was heard of."""
    restarts: tuple[Mapping[str, Any], ...] = ()
    """Deaths of processes that the supervisor saw: process, time, exit."""
    grader_restarts: int = 0
    """As the pools counted them."""
    grading: Grading | None = None
    """Of the reward pools."""
    alarms: tuple[str, ...] = ()
    """What a pool or the learner wants a person to look at."""
    dead_letters: tuple[Mapping[str, Any], ...] = ()
    """Groups given up, where they were asked for."""
    journalled: int | None = None
    """Rows written."""
    term: int | None = None
    """Of the newest learner."""
    waiting_for: str = ""
    """Whom the next row waits for."""
    problem: str = ""
    """Why the figures from Redis are old or missing; empty where they aren't."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a run without asking Redis."""

    run: str
    """Its folder, or the join file."""
    preset: str | None = None
    """That it was started with."""
    state: str | None = None
    """As the folder or the supervisor has it."""
    supervisor: int | None = None
    """Process id."""
    elapsed_seconds: float | None = None
    """In all its lives."""
    total_steps: int | None = None
    """``run.steps``."""
    limit: int | None = None
    """``replay.max_staleness``."""
    ledger: Mapping[str, int] = field(default_factory=dict)
    """Groups by state, as the summary of a finished run has them."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """Likewise, idle shares by role."""
    dead_letters: tuple[Mapping[str, Any], ...] = ()
    """Likewise, groups given up."""
