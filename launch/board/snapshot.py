"""The state of a run at one moment: the one record that the live view and ``tandem status`` show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .history import Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Groups on their way, and evaluations that aren't done."""

    returned: int = 0
    """Groups that were leased before and are free again."""
    leased: int = 0
    """Groups that a worker has."""
    submitted: int = 0
    """Groups that a worker has finished, and whose receipt from a pool is still to come."""
    grading: int = 0
    """Groups that a pool grades."""
    graded: int = 0
    """Groups that are ready for a batch."""
    taken: int = 0
    """Groups in the batch that is being trained on."""
    evaluations: int = 0
    """Evaluations that were requested and aren't done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Age, in steps, of the samples that were trained on recently."""

    mean: float | None = None
    """Mean age over the recent steps."""
    max: float | None = None
    """The oldest sample's age in the recent steps."""
    limit: int | None = None
    """``replay.max_staleness``."""
    shares: tuple[float, ...] = ()
    """Share of the samples by age, from 0 on; the ninth also counts all older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStanding:
    """All members of a role."""

    role: str
    """learner, rollout or reward."""
    members: int
    """Number of its members that were heard of."""
    idle: float | None
    """Share of their recent time that they waited."""
    waits_for: str
    """Whom they wait for most: a role, ``redis`` or ``graders``; empty if they are busy."""
    waits_what: str
    """What they need from it, in words for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStanding:
    """One process."""

    member: str
    """The process's id in the run."""
    role: str
    """learner, rollout or reward."""
    age: float
    """Seconds since its last heartbeat, by Redis's clock."""
    pid: int | None
    """Process id on its host."""
    host: str | None
    version: tuple[int, int] | None
    """(term, step) of the weights that it holds; None if it holds none."""
    idle: float | None
    """Share of its recent time that it waited."""
    waiting_for: str
    """What the process reports to wait for; empty if it doesn't wait, or doesn't say."""
    tokens_per_second: float | None
    """Sampled tokens per second, by its last report."""
    memory: int | None = None
    """The most main memory that it has held lately (a worker since its start, with its engine), in bytes."""
    gpu_memory: int | None = None
    """The most that its tensors had of its GPU, in bytes; None without a GPU, and for vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStanding:
    """One host, as its supervisor reports it."""

    name: str
    """Name of the host."""
    member: str
    """Its id in the run, a new one with every start of its supervisor."""
    address: str
    """The address by which it takes part."""
    role: str
    """head, rollout, reward, learner or environments."""
    processes: int
    """Number of processes that it keeps running."""
    pid: int
    """Process id of its supervisor."""
    leaving: bool
    """Whether it drains."""
    age: float
    """Seconds since its last heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """The questions of all reward pools to judges and reward models, since the pools' starts."""

    asked: int
    """Questions that have an answer or were given up."""
    failed: int
    """Those that were given up: their samples left the baseline."""
    retries: int
    """Further attempts."""
    cached: int
    """Samples that took the answer to an equal question."""
    waiting: int
    """Questions without an answer now."""
    seconds: float
    """Mean seconds from question to answer."""
    failed_share: float
    """Share of the last minute's questions that were given up, in the worst pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Episodes of all rollout workers together, since their starts unless stated otherwise."""

    under_way: int
    """Episodes that are being played now."""
    played: int
    """Episodes that are over."""
    failed: int
    """Episodes among those played that failed through no fault of the policy."""
    turns: int
    """The policy's turns in them."""
    retokenised: int
    """Conversations in which a client rendered sampled text differently."""
    environment_seconds: float
    """Time that they spent in their environments."""
    model_seconds: float
    """Time that they waited for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """All reward pools together, since their starts unless stated otherwise."""

    samples: int
    """Number of graded samples."""
    verdicts: Mapping[str, int]
    """Number of graded samples by verdict."""
    to_process: int
    """Answers that a grader process compared."""
    cached: int
    """Answers that took the verdict of an equal one."""
    queued: int
    """Requests that are waiting for a process now."""
    queue_wait: float
    """Mean seconds that a request waited for a process."""
    seconds: float
    """Mean seconds that a request took in its process."""
    hang_share: float
    """Share of the last minute's requests that hung, in the worst pool."""
    crash_share: float
    """Share of the last minute's requests that crashed, in the worst pool."""
    judge: Judging | None = None
    """None if the reward asks no judge or reward model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment. Figures that nobody has reported yet are None or empty."""

    time: float
    """When this snapshot was made, in seconds since the epoch."""
    run: str
    """The run's folder, or the join file."""
    preset: str | None = None
    """The preset that the run was started with."""
    state: str | None = None
    """starting, running, draining, finished, failed or stopped."""
    supervisor: int | None = None
    """Process id of its ``tandem start``."""
    elapsed_seconds: float | None = None
    """Seconds that the run has been up, over all its starts."""
    step: int = 0
    """The latest step that was trained."""
    total_steps: int | None = None
    """Number of steps of the run, if it is known."""
    seconds_per_step: float | None = None
    """The recent pace."""
    seconds_left: float | None = None
    """Seconds to the last step at the recent pace."""
    reward: float | None = None
    """Mean reward of the latest step."""
    rewards: tuple[float, ...] = ()
    """Mean rewards of the recent steps, oldest first."""
    loss: float | None = None
    """The latest step's loss."""
    zero_variance: float | None = None
    """Share of the recent groups without a signal."""
    response_length: float | None = None
    """Mean length of the recent responses, in tokens."""
    entropy: float | None = None
    """The policy's entropy on its own recent tokens, in nats per token."""
    held_out: tuple[str, ...] = ()
    """Names of the held-out sets, in the order of the settings; empty if they aren't known."""
    evaluations: tuple[Evaluated, ...] = ()
    """All evaluations, by step."""
    tokens_sampled_per_second: float | None = None
    """Rate of all workers together, by their last reports."""
    tokens_trained_per_second: float | None = None
    """The recent rate, expert tokens included."""
    samples_trained_per_second: float | None = None
    """The recent rate, expert rows included."""
    ledger: Mapping[str, int] = field(default_factory=dict)
    """Groups by state."""
    queues: Queues = Queues()
    """Groups on their way."""
    staleness: Staleness = Staleness()
    """How old the samples of the recent steps were."""
    memory_peaks: Mapping[str, float] = field(default_factory=dict)
    """Bytes by part of the latest step that has them: the metrics ``memory/…``, by their names after that."""
    roles: tuple[RoleStanding, ...] = ()
    """Who is busy and who waits."""
    members: tuple[MemberStanding, ...] = ()
    """Every process that was heard of."""
    hosts: tuple[HostStanding, ...] = ()
    """Hosts heard of in the last ten minutes, the head first."""
    restarts: tuple[Mapping[str, Any], ...] = ()
    """Deaths of processes that the supervisor saw: process, time, exit."""
    grader_restarts: int = 0
    """Restarts of graders, as the pools counted them."""
    grading: Grading | None = None
    """What the reward pools have graded."""
    episodes: Episodes | None = None
    """What is played in environments; None without any."""
    alarms: tuple[str, ...] = ()
    """What a pool or the learner wants a person to look at."""
    dead_letters: tuple[Mapping[str, Any], ...] = ()
    """Groups that were given up, if they were asked for."""
    journalled: int | None = None
    """Number of rows that were journalled."""
    term: int | None = None
    """The newest learner's term."""
    waiting_for: str = ""
    """Whom the next row waits for."""
    problem: str = ""
    """Why the figures from Redis are old or missing; empty if they aren't."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a run without asking Redis."""

    run: str
    """The run's folder, or the join file."""
    preset: str | None = None
    """The preset that the run was started with."""
    state: str | None = None
    """The state according to the folder or the supervisor."""
    supervisor: int | None = None
    """Process id of its ``tandem start``."""
    elsewhere: str = ""
    """Process and host of its ``tandem start``, if the run is under way on another host."""
    elapsed_seconds: float | None = None
    """Seconds that the run has been up, over all its starts."""
    total_steps: int | None = None
    """The step with which the run ends, if that is known from the settings."""
    held_out: tuple[str, ...] = ()
    """Names of ``data.evaluate``, in their order."""
    limit: int | None = None
    """``replay.max_staleness``."""
    ledger: Mapping[str, int] = field(default_factory=dict)
    """Groups by state, from a finished run's summary."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """Idle shares by role, from a finished run's summary."""
    dead_letters: tuple[Mapping[str, Any], ...] = ()
    """Groups that were given up, from a finished run's summary."""
